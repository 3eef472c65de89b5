"""Elastic training of the models of Megatron-LM's scripts: ``--elastic``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import moe_module_specs
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.utils import get_model_config
from megatron.training import get_tensorboard_writer, initialize, training

from megatron.pretraining.config import Config, ConfigError
from megatron.pretraining.config.flag import refuse
from megatron.pretraining.data.identity import TokenIdLimit
from megatron.pretraining.data.streams import Batch, BatchStream
from megatron.pretraining.elastic.gradients import ElasticDataParallel
from megatron.pretraining.elastic.groups import gradient_groups
from megatron.pretraining.elastic.moe_layer import ElasticLayer, elastic_layers
from megatron.pretraining.elastic.placement import Plans, assign_experts, build_domains
from megatron.pretraining.engine.optimizer import shard_by_blocks
from megatron.pretraining.engine.step import Stepper, sum_losses
from megatron.pretraining.entry.stock import bare_chunks, get_args, replaced
from megatron.pretraining.logging.records import perplexity_of
from megatron.pretraining.parts import TrainingRun
from megatron.pretraining.process.nodes import order_of_ranks, per_node
from megatron.pretraining.process.stopping import StopRequests
from moc.fault_points import reach
from moc.runtime.collectives import sum_over_workers
from moc.runtime.environment import min_nodes, node_limits
from moc.runtime.job import Job
from moc.runtime.progress import progress


def set_up(
    config: Config, container: Any, model_type: Any, provider: Callable[..., Any] | None, groups: Any
) -> tuple[list[Any], Any, Any]:
    """Builds model, optimizer and schedule, in the place of Megatron-LM's ``setup_model_and_optimizer``.

    Every mixture-of-experts layer has as many experts as this worker has slots.  The hook of the model's builder
    assigns them (:meth:`megatron.pretraining.entry.program.StockProgram.build`).

    Args:
        config: the flags in force.
        container: Megatron-LM's configuration; it describes the model, unless ``provider`` builds it.
        model_type: Megatron-LM's kind of model.
        provider: builds a model chunk.
        groups: Megatron-LM's collection of process groups.
    """
    args, slots = get_args(), min(config.elastic.elastic_slots or 0, config.moe.num_experts or 0)
    with replaced(moe_module_specs, MoELayer=functools.partial(ElasticLayer, slots=slots)):
        bare_chunk_list = bare_chunks(container, model_type, provider, groups)
    core_config, reduced_over = get_model_config(bare_chunk_list[0]), gradient_groups(config)
    ddp_config: Any = dataclasses.replace(
        container.ddp, use_distributed_optimizer=args.use_distributed_optimizer and not config.shards_by_blocks
    )
    chunks = [
        ElasticDataParallel(core_config, ddp_config, chunk, pg_collection=reduced_over) for chunk in bare_chunk_list
    ]
    configured: Any = training.get_megatron_optimizer_config(args)
    optimizer_config, overrides = configured
    optimizer_config.use_distributed_optimizer = ddp_config.use_distributed_optimizer
    core = get_megatron_optimizer(
        optimizer_config,
        [*chunks],
        config_overrides=overrides,
        use_gloo_process_groups=False,
        pg_collection=reduced_over,
    )
    if config.shards_by_blocks:
        shard_by_blocks(core, chunks)
    args.iteration = args.num_floating_point_operations_so_far = 0
    return chunks, core, training.get_optimizer_param_scheduler(core)


def build_groups(config: Config, job: Job, ranks: dict[str, Any]) -> None:
    """Lets Megatron-LM build its process groups for the members of a generation.

    Args:
        config: the flags in force.
        job: job of this worker.
        ranks: functions that choose the ranks with embeddings, as Megatron-LM's parameters.
    """
    with order_of_ranks(config, job.partial_model_parts):
        initialize._initialize_distributed(**ranks, store=None)
    build_domains_of(config, job)


def build_domains_of(config: Config, job: Job) -> None:
    """Creates the process groups of the dispatch of tokens, after Megatron-LM's groups."""
    with order_of_ranks(config, job.partial_model_parts):
        build_domains(config, node_limits()[1] * per_node() if min_nodes() is not None else job.size)


def fill_expert_slots(config: Config, chunks: Sequence[torch.nn.Module], plans: Plans) -> None:
    """Gives this worker's slots their experts, before weights are initialised by the numbers of experts.

    Raises:
        ConfigError: megatron-core's specification did not build the layers with experts.
    """
    plan, layers = plans.get(parallel_state.get_pipeline_model_parallel_rank()), elastic_layers(chunks)
    refuse(
        sorted(layer.layer for layer in layers) != sorted(plan.tables if plan is not None else ()),
        "--elastic places the experts of GPT's layers, and this model has others. Fix: drop it, or build the layers by "
        "megatron-core's specification",
        code="elastic-unsupported",
    )
    if plan is not None:
        assign_experts(layers, plan, config.elastic.elastic_dispatch)


@contextlib.contextmanager
def uneven_batch(args: Any, elastic: bool) -> Iterator[None]:
    """Lets Megatron-LM's check of arguments accept a global batch that data-parallel ranks cannot share evenly."""
    if elastic and args.global_batch_size and args.eval_global_batch_size is None:
        model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
        ranks = max(args.world_size // model, 1)
        args.eval_global_batch_size = args.global_batch_size * (args.eval_micro_batch_size or 1) * ranks
        yield
        args.eval_global_batch_size = args.global_batch_size
    else:
        yield


def evaluate(run: TrainingRun, split: str, earlier: int, stop: StopRequests) -> bool:
    """Reports the loss of a split, which does not depend on the number of workers; False if a stop was requested.

    Args:
        run: the run, after an iteration.
        split: ``valid`` or ``test``.
        earlier: evaluations whose samples precede this one's.
        stop: requests to stop.
    """
    args, topology = get_args(), run.stepper.topology
    size = topology.global_batch_size
    batches = (run.batches(split, (earlier * args.eval_iters + number) * size) for number in range(args.eval_iters))
    loss = mean_loss(run.stepper, batches, stop)
    run.stepper.auxiliary.drop()
    if loss is not None:
        run.log.evaluation(run.position.iteration, split, loss)
        if not args.skip_train and (board := get_tensorboard_writer()) is not None:  # as evaluate_and_print_results
            board.add_scalar(f"{run.stepper.auxiliary.loss_name} validation", loss, run.position.iteration)
        name = {"valid": "validation"}.get(split, split)
        run.log.message(
            f"{name} loss at iteration {run.position.iteration}: {loss:.6E}, PPL: {perplexity_of(loss):.6E}"
        )
    return loss is not None


def streams_of(
    datasets: Mapping[str, Sequence[Any]], limits: Mapping[str, TokenIdLimit | None]
) -> dict[str, BatchStream | None]:
    """Returns the readers of the splits, from any position and in the topology of any generation.

    Raises:
        ConfigError: the samples are not dictionaries with a ``loss_mask``, which dummy micro batches need.
    """
    workers, streams = get_args().num_workers, {}
    for split, (dataset,) in datasets.items():  # no virtual stages
        if dataset is not None and not _has_loss_mask(dataset[0]):
            raise ConfigError(
                f"the samples of the {split} split have no loss_mask, and --elastic deals micro batches without tokens "
                "that count. Fix: add a loss_mask to the samples, or drop --elastic",
                code="datasets-unsupported",
            )
        train = split == "train"
        streams[split] = None if dataset is None else BatchStream(dataset, workers * train, not train, limits[split])
    return streams


def _has_loss_mask(sample: Any) -> bool:
    return isinstance(sample, dict) and torch.is_tensor(sample.get("loss_mask"))


def mean_loss(stepper: Stepper, batches: Iterable[Iterator[Batch] | None], stop: StopRequests) -> float | None:
    """Returns the mean loss over global batches, in nats per token; None on a stop request.  A collective call.

    ``batches`` has this worker's micro batches of each global batch, None on stages that read no data.
    """
    with stepper.modules.unchanged():
        for chunk in stepper.chunks:
            chunk.eval()
        try:
            total = tokens = 0.0
            for micro_batches in batches:
                progress("evaluation")
                reach("evaluating")
                reports = stepper.schedule.forward(micro_batches)
                contribution = {**sum_losses(reports, stepper.world), "stop": float(stop.pending)}
                sums = sum_over_workers(contribution, stepper.world)
                if sums["stop"] > 0:
                    return None
                total, tokens = total + sums["loss_sum"], tokens + sums["loss_tokens"]
            return total / max(tokens, 1.0)
        finally:
            for chunk in stepper.chunks:
                chunk.train()
