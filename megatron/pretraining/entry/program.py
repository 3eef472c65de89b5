"""Adapts Megatron-LM's program to our loop: Megatron-LM builds model, optimizer and data, and our loop trains."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import check_param_hashes_across_dp_replicas, get_model_config
from megatron.training import initialize_megatron, training

from megatron.pretraining.config import Config, ConfigError
from megatron.pretraining.config.deterministic import about_bits
from megatron.pretraining.duties import due
from megatron.pretraining.elastic.placement import Plans, first_plans, nodes_of_stages
from megatron.pretraining.elastic.state import ElasticState, announce_restarts
from megatron.pretraining.engine.megatron import Model
from megatron.pretraining.engine.module_state import ModuleState
from megatron.pretraining.engine.optimizer import CommitOptimizer
from megatron.pretraining.engine.schedule import RateSchedule
from megatron.pretraining.entry import cpu, deepspeed, elastic
from megatron.pretraining.entry.checkpoints import StockCheckpoints
from megatron.pretraining.entry.configuration import described
from megatron.pretraining.entry.flags import refused_by_megatron
from megatron.pretraining.entry.formats import multiply_in_format, store_in_formats
from megatron.pretraining.entry.log import Profiling, StockLog
from megatron.pretraining.entry.model import model_of_chunks
from megatron.pretraining.entry.optimizers import refuse_built
from megatron.pretraining.entry.schedule import Reports, StockSchedule, StockTopology, clear_trackers, reporting
from megatron.pretraining.entry.stock import get_args, get_timers, replaced
from megatron.pretraining.entry.streams import (
    build_split_datasets,
    data_identity,
    data_sizes,
    padded_rows,
    streams_of,
    token_id_limits,
)
from megatron.pretraining.model.corrections import defects_of
from megatron.pretraining.model.parameters import EXACT, initialize_weights
from megatron.pretraining.parts import Callback, TrainingRun, WorkerParts
from megatron.pretraining.process.core import transformer_engine
from megatron.pretraining.process.cpu import device
from megatron.pretraining.process.initialize import COLLECTIVES_ONLY, let_regroup, take_parts, world_of
from megatron.pretraining.process.nodes import order_of_ranks
from megatron.pretraining.process.phases import Phases
from megatron.pretraining.process.stopping import StopRequests
from megatron.pretraining.process.topology import Topology, topology_of
from megatron.pretraining.session import auto_policy
from megatron.pretraining.setup import micro_batch_hooks, pipeline_substitute
from moc.errors import warning
from moc.fault_points import reach
from moc.runtime.collectives import run_on_rank0, sum_over_workers
from moc.runtime.job import Job, World
from moc.runtime.progress import progress


@dataclass
class StockProgram:
    """A :class:`megatron.pretraining.parts.Program` of the arguments of ``megatron.training.pretrain``.

    Attributes:
        container: Megatron-LM's configuration.
        datasets: Megatron-LM's provider of datasets.
        model_type: Megatron-LM's model type.
        forward_step: ``(iterator, model) -> (output, loss function)``.
        model_provider: builds a model chunk, if ``container`` describes none.
        process_non_loss_data: plots the data that an evaluation collects.
        non_loss_data: collects these data.
        embedding_ranks: chooses the ranks with embeddings.
        position_embedding_ranks: chooses the ranks with position embeddings.
        profiling: profiler of this worker, from its first iteration.
    """

    container: Any
    datasets: Callable[..., Any]
    model_type: Any
    forward_step: Callable[..., Any]
    model_provider: Callable[..., Any] | None = None
    process_non_loss_data: Callable[..., Any] | None = None
    non_loss_data: Callable[..., Any] | None = None
    embedding_ranks: Callable[..., Any] | None = None
    position_embedding_ranks: Callable[..., Any] | None = None
    profiling: Profiling | None = None

    def connect(self, config: Config, job: Job) -> World:
        """Joins the job, and lets Megatron-LM build its process groups and random streams."""
        args = get_args()
        cpu.take_device(config, args.local_rank)
        job.collectives_only = COLLECTIVES_ONLY
        ranks: dict[str, Any] = dict(
            get_embedding_ranks=self.embedding_ranks, get_position_embedding_ranks=self.position_embedding_ranks
        )
        if config.elastic.elastic:
            take_parts(config, job)
            let_regroup(config, job, lambda: elastic.build_groups(config, job, ranks))
        job.connect(args.distributed_backend, timedelta(minutes=args.distributed_timeout_minutes), device())
        with order_of_ranks(config, job.partial_model_parts):
            initialize_megatron(allow_no_cuda=True, **ranks)
        if config.elastic.elastic:
            elastic.build_domains_of(config, job)
        args.rank, args.world_size = job.rank, job.size
        return world_of(job)

    def build(self, config: Config, world: World, stop: StopRequests, phases: Phases) -> WorkerParts:
        """Builds model, optimizer and data by Megatron-LM's functions."""
        args = get_args()
        update_num_microbatches(0, consistency_check=False)
        stop.check_set_up(world, would_lose_state=stop.may_lose(world.job))
        phases.done("tokenizer")
        # the session chooses the state; for a schedule in samples, the number of iterations is not known yet
        iterations = None if args.train_samples else args.train_iters
        with replaced(args, load=None, pretrained_checkpoint=None, skip_train=False, train_iters=iterations):
            nodes = nodes_of_stages(config, world.size, world.job.partial_model_parts)
            plans = first_plans(config, nodes) if config.elastic.elastic else None
            chunks, core, scheduler = self._set_up(config, plans)
        refuse_built(core, chunks)
        core_config = get_model_config(chunks[0])
        core_config.grad_scale_func, core_config.timers = core.scale_loss, get_timers()
        _let_schedule_overlap_communication(args, core_config, chunks)
        optimizer = CommitOptimizer(core, chunks, args.clip_grad, config.regularization.grad_norm)
        log = StockLog(config, world, core)
        if release := transformer_engine():
            log.message(f"Transformer Engine {release}")
        if world.device.type == "cuda" and (sentence := about_bits(config)):
            log.message(sentence)
        _correct(config, chunks, log)
        stop.check_set_up(world, would_lose_state=stop.may_lose(world.job))
        phases.done("model")
        reach("rebuilding")
        datasets = build_split_datasets(self.datasets, len(chunks), config.data.allow_changed_data, log.message)
        readers: Any = elastic.streams_of if config.elastic.elastic else streams_of
        streams = readers(datasets, token_id_limits(datasets))
        announce_restarts(config, log)
        phases.done("data")
        modules, moving = ModuleState(chunks), None
        if plans is not None:
            moving = ElasticState.of(config, world, chunks, modules, optimizer, plans, nodes)
        return WorkerParts(
            config=config,
            world=world,
            chunks=chunks,
            modules=modules,
            optimizer=optimizer,
            scheduler=scheduler,
            program=self,
            streams=streams,
            train_iters=args.train_iters,
            vocabulary_rows=args.padded_vocab_size or 0,
            log=log,
            auto=auto_policy(config, log),
            data=data_identity(datasets),
            data_sizes=data_sizes(datasets["train"]),
            moving=moving,
        )

    def topology(self, config: Config, world: World) -> Topology:
        """Returns this worker's share of the global batch, whose size may change during the run.

        Also sets Megatron-LM's arguments of rank and sizes, which change with the members of the job.
        """
        args = get_args()
        args.rank, args.world_size, args.data_parallel_size = world.rank, world.size, world.data_size
        return topology_of(config, world) if config.elastic.elastic else StockTopology(world)

    def schedule(self, parts: WorkerParts, topology: Topology) -> StockSchedule:
        """Returns the schedule with Megatron-LM's forward step."""
        reports = Reports(parts, topology)
        _stock_log(parts).begin(reports, topology)
        return StockSchedule(
            reporting(self.forward_step, reports),
            parts.chunks,
            micro_batch_hooks(parts, topology),
            topology,
            pipeline_substitute(parts),
        )

    def auxiliary(self, parts: WorkerParts, topology: Topology) -> Reports:
        """Returns the reports of the schedule's loss function."""
        reports = _stock_log(parts).reports
        assert reports is not None  # the generation's schedule is built
        return reports

    def model(self, parts: WorkerParts) -> Model:
        """Returns the operators of the built chunks."""
        masks = "vocabulary-padding" in parts.config.training.corrections
        return model_of_chunks(parts.chunks, parts.optimizer.core, parts.world, described(get_args()), masks)

    def checkpoints(self, parts: WorkerParts, model: Model) -> Any:
        """Returns the checkpoints in Megatron-LM's format."""
        return StockCheckpoints(parts, model)

    def evaluate(self, run: TrainingRun, split: str, stop: StopRequests, final: bool = False) -> bool:
        """Evaluates and reports by Megatron-LM's functions, unless a worker was asked to stop."""
        args, iteration = get_args(), run.position.iteration
        if not args.eval_iters or split not in run.splits or not (final or iteration >= (args.start_eval_at_iter or 0)):
            return True
        if final and split == "valid" and not args.skip_train and _is_repeated(run):
            return True
        earlier = evaluations_before(args, iteration, final) if split == "valid" else 0
        with _collected_garbage(args.manual_gc and args.manual_gc_eval and not final):
            if run.config.elastic.elastic:
                return elastic.evaluate(run, split, earlier, stop)
            return self._evaluate(run, split, earlier, stop, final)

    def _evaluate(self, run: TrainingRun, split: str, earlier: int, stop: StopRequests, final: bool) -> bool:
        args, iteration, stream = get_args(), run.position.iteration, cast(Any, run.streams[split])
        args.consumed_valid_samples = earlier * args.eval_global_batch_size * args.eval_iters
        collected = _Losses()
        suffix = {False: "", True: f" on {'validation' if split == 'valid' else 'test'} set"}[final]
        stoppable = functools.partial(_stoppable, training.get_forward_backward_func, run.world, stop)
        try:
            with (
                run.stepper.modules.unchanged(),
                replaced(training, get_forward_backward_func=stoppable),
                replaced(args, exit_duration_in_mins=None),  # counted from the import; ``stop`` knows the time
            ):
                training.evaluate_and_print_results(
                    f"iteration {iteration}{suffix}",
                    collected.collecting(self.forward_step),
                    stream.iteration(run.stepper.topology, args.consumed_valid_samples),
                    run.stepper.chunks,
                    iteration,
                    self.process_non_loss_data,
                    get_model_config(run.stepper.chunks[0]),
                    verbose=final,
                    write_to_tensorboard=not args.skip_train,
                    non_loss_data_func=self.non_loss_data,
                )
        except _Stopped:
            _forget_iteration(run.stepper.chunks)
            return False
        clear_trackers()
        sums = sum_over_workers(collected.contribution(run.world) | {"stop": float(stop.pending)}, run.world)
        run.log.evaluation(iteration, split, sums["loss"] / max(sums["weight"], 1.0))
        return not sums["stop"]

    def forget_iteration(self, parts: WorkerParts) -> None:
        """Clears the leftovers of an interrupted iteration or evaluation."""
        _forget_iteration(parts.chunks)

    def callbacks(self, world: World) -> tuple[Callback, ...]:
        """Returns the steps of Megatron-LM's loop around an iteration."""
        if self.profiling is None:
            self.profiling = Profiling(world.rank)
        return (StockSteps(self.profiling),)

    def _set_up(self, config: Config, plans: Plans | None) -> tuple[Any, Any, Any]:
        """Returns the model chunks, the optimizer and the schedule of learning rates."""
        groups, provider = ProcessGroupCollection.use_mpu_process_groups(), self._provider(config, plans)
        with replaced(training, OptimizerParamScheduler=RateSchedule), refused_by_megatron():
            for is_enabled, engine in ((config.zero.deepspeed, deepspeed), (config.elastic.elastic, elastic)):
                if is_enabled:
                    built: Any = engine.set_up(config, self.container, self.model_type, provider, groups)
                    break
            else:
                built = training.setup_model_and_optimizer(
                    self.model_type,
                    model_provider_func=provider,
                    checkpointing_context={},
                    cfg_container=self.container,
                    pg_collection=groups,
                )
        store_in_formats(get_args(), built[1])
        return built

    def _provider(self, config: Config, plans: Plans | None) -> Callable[..., Any] | None:
        """Returns the model provider; it, or the model's builder, adapts experts to a CPU and initialises weights.

        With ``--elastic``, ``plans`` determine the experts of this worker.
        """
        model, provider = getattr(self.container, "model", None), self.model_provider

        def prepare(chunks: list[Any]) -> list[Any]:
            cpu.repair_experts(chunks)
            if plans is not None:
                elastic.fill_expert_slots(config, chunks, plans)
            multiply_in_format(get_args(), chunks)
            if config.rng.initialization == EXACT:
                for chunk in chunks:
                    initialize_weights(chunk, config.rng.seed)
            return chunks

        if model is not None:
            model.pre_wrap_hooks.append(prepare)
            return provider
        if provider is None:
            raise ConfigError(
                "pretrain() got neither a model in its configuration nor a model_provider. Fix: give one",
                code="model-missing",
            )

        @functools.wraps(provider)
        def prepared(*args: Any, **kwargs: Any) -> Any:
            return prepare([provider(*args, **kwargs)])[0]

        return prepared


@dataclass
class StockSteps(Callback):
    """Steps of Megatron-LM's loop around an iteration: profiles, synchronizes, and compares the replicas' weights."""

    profiling: Profiling

    def before_iteration(self, run: TrainingRun) -> None:
        """Starts profilers."""
        self.profiling.begin(run.position.iteration)

    def after_iteration(self, run: TrainingRun) -> None:
        """As :meth:`Callback.after_iteration`.

        Raises:
            ConfigError: weights differ between replicas.
        """
        args, iteration = get_args(), run.position.iteration
        self.profiling.end(iteration)
        if args.empty_unused_memory_level >= 1:
            torch.cuda.empty_cache()
        if due(args.train_sync_interval, iteration):
            torch.cuda.synchronize()
        if due(args.check_weight_hash_across_dp_replicas_interval, iteration):
            for chunk in run.stepper.chunks:
                if args.overlap_param_gather:
                    chunk.start_param_sync(force_sync=True)
            if not check_param_hashes_across_dp_replicas([*run.stepper.chunks], cross_check=True):
                raise ConfigError(
                    f"weights differ between data-parallel replicas after iteration {iteration}. Fix: resume from an "
                    "earlier checkpoint",
                    code="replicas-differ",
                )


def evaluations_before(args: Any, iteration: int, final: bool = False) -> int:
    """Returns the number of evaluations whose validation samples precede those of the evaluation after ``iteration``.

    A ``final`` evaluation follows that evaluation.  A program that skips training begins with sample 0.
    """
    if args.skip_train:
        return 0
    skipped = max(math.ceil((args.start_eval_at_iter or 0) / args.eval_interval) - 1, 0)
    return max(iteration // args.eval_interval - skipped - (not final), 0)


def _correct(config: Config, chunks: Sequence[torch.nn.Module], log: StockLog) -> None:
    """Applies the corrections of ``--correct``; without the flag, warns of defects that are not corrected."""
    replicas = parallel_state.get_data_parallel_world_size()
    for defect in defects_of(chunks, padded_rows(get_args()), replicas):
        if defect.name in config.training.corrections:
            defect.correct()
        elif defect.effect and "correct" not in config.given:
            log.message(
                warning(
                    f"{defect.effect}. Fix: pass --correct {defect.name}, or --correct all",
                    code="result-depends-on-layout",
                )
            )
    core: Any = get_model_config(chunks[0])
    shards = parallel_state.get_tensor_model_parallel_world_size() * parallel_state.get_context_parallel_world_size()
    if core.num_moe_experts and core.moe_expert_capacity_factor is not None and shards > 1:
        log.message(
            warning(
                f"each of {shards} tensor- or context-parallel workers limits the tokens that it sends to an expert: "
                "other tokens are dropped than in another layout. Fix: keep the layout, or drop "
                "--moe-expert-capacity-factor",
                code="result-depends-on-layout",
            )
        )


def _is_repeated(run: TrainingRun) -> bool:
    """Returns whether to omit the final validation loss since this iteration has one; a collective call."""
    iteration = run.position.iteration
    if not run_on_rank0(lambda: run.log.was_evaluated(iteration), "cannot look for evaluations"):
        return False
    if "final-evaluation" in run.config.training.corrections:
        return True
    if "correct" not in run.config.given:
        run.log.message(
            warning(
                f"iteration {iteration} gets a second validation loss, of other samples. Fix: pass --correct "
                "final-evaluation, or --correct all",
                code="loss-reported-twice",
            )
        )
    return False


def _stock_log(parts: WorkerParts) -> StockLog:
    assert isinstance(parts.log, StockLog)  # build() has made it
    return parts.log


@contextlib.contextmanager
def _collected_garbage(enabled: bool) -> Iterator[None]:
    """Collects garbage before and after an evaluation, as Megatron-LM's loop does."""
    if enabled:
        gc.collect()
    yield
    if enabled:
        gc.collect(generation=0)


class _Stopped(Exception):
    """An evaluation ends on all workers because one was asked to stop."""


def _stoppable(choose: Callable[..., Any], world: World, stop: StopRequests, **options: Any) -> Callable[..., Any]:
    """Returns megatron-core's schedule, which raises :class:`_Stopped` at its start if a worker was asked to stop."""
    schedule = choose(**options)

    def scheduled(**arguments: Any) -> Any:
        collects_plots = arguments.get("collect_non_loss_data")  # only the last worker collects data to plot
        if not collects_plots and sum_over_workers({"stop": float(stop.pending)}, world)["stop"]:
            raise _Stopped
        return schedule(**arguments)

    return scheduled


def _forget_iteration(chunks: Sequence[torch.nn.Module]) -> None:
    """Resets timers, trackers and modes after an interrupted iteration or evaluation."""
    timers = get_timers()
    for timer in timers._timers.values():
        timer._started = False
        timer.reset()
    get_model_config(chunks[0]).timers = timers
    for chunk in chunks:
        chunk.train()
    clear_trackers()


class _Losses:
    """The loss of an evaluation, by the first value of each report."""

    def __init__(self):
        self._sums: list[torch.Tensor] = []

    def collecting(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the forward step, wrapped so that its reports are collected."""

        def step(batches: Any, chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
            progress("evaluation")
            reach("evaluating")
            output, loss_function = forward_step(batches, chunk)

            def loss(tensor: torch.Tensor, **options: Any) -> Any:
                result = loss_function(tensor, **options)
                if options.get("non_loss_data"):
                    return result
                value = next(iter(result[-1].values())) if isinstance(result, tuple) else None
                if torch.is_tensor(value):
                    flat = value.detach().double().view(-1)
                    self._sums.append(
                        flat if flat.numel() == 2 else torch.cat([flat.sum()[None], torch.ones_like(flat[:1])])
                    )
                return result

            return output, loss

        return step

    def contribution(self, world: World) -> dict[str, torch.Tensor]:
        """Returns this worker's sum and weight; tensor-parallel replicas count once."""
        counted = self._sums if world.tensor_rank == 0 else []
        total = sum(counted, torch.zeros(2, dtype=torch.float64, device=world.device))
        return {"loss": total[0], "weight": total[1]}


def _let_schedule_overlap_communication(args: Any, core_config: Any, chunks: list[Any]) -> None:
    """Gives the schedule the functions that it calls around micro batches."""

    def unwrap_single(functions: list[Any]) -> Any:
        return functions if len(chunks) > 1 else functions[0]

    if args.overlap_grad_reduce:
        core_config.no_sync_func = unwrap_single([chunk.no_sync for chunk in chunks])
        if args.align_grad_reduce:
            core_config.grad_sync_func = unwrap_single([chunk.start_grad_sync for chunk in chunks])
    if args.overlap_param_gather and args.align_param_gather:
        core_config.param_sync_func = unwrap_single([chunk.start_param_sync for chunk in chunks])
