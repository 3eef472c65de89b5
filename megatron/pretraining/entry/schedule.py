"""The schedule of an iteration with Megatron-LM's forward step, and the reports of its loss function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    update_num_microbatches,
)
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.moe_logging import MetricEntry, get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron.pretraining.config import ConfigError
from megatron.pretraining.duties import due
from megatron.pretraining.engine.routing import ExpertLoad, LoadCounter
from megatron.pretraining.engine.schedule import ForwardStep, MicroBatchHooks, Schedule
from megatron.pretraining.entry.stock import get_args
from megatron.pretraining.parts import WorkerParts
from megatron.pretraining.process.topology import Topology
from moc.errors import with_code
from moc.runtime.collectives import gather
from moc.runtime.job import World

_SUM, _WEIGHT, _LOAD = "report/sum/", "report/weight/", "report/load"


class StockTopology(Topology):
    """A share of a global batch whose size Megatron-LM's calculator determines.

    The size is valid for the position whose micro batches were requested last.
    """

    def __init__(self, world: World):
        object.__setattr__(self, "world", world)
        object.__setattr__(self, "micro_batch_size", get_args().micro_batch_size)

    @property
    def global_batch_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Samples of the current iteration, over all workers."""
        return get_current_global_batch_size()

    @property
    def rounds(self) -> int:
        """Micro batches of each rank in the current iteration."""
        return get_num_microbatches()


def problem_of_length(datasets: Sequence[Any]) -> str | None:
    """Returns the problem of training data that end before the run, whose batches grow; None without one.

    Megatron-LM requests samples for ``--train-iters`` batches of one micro batch for each data-parallel rank.

    Args:
        datasets: training data of each model chunk; None where another tensor-parallel rank sends the data.
    """
    args, lengths = get_args(), [len(dataset) for dataset in datasets if dataset is not None]
    if args.step_batch_size_schedule is None or args.train_samples or args.dataloader_type == "cyclic" or not lengths:
        return None
    samples = 0
    for _ in range(args.train_iters):
        update_num_microbatches(samples, consistency_check=False)
        samples += get_current_global_batch_size()
    update_num_microbatches(0, consistency_check=False)
    if samples <= min(lengths):
        return None
    problem = ConfigError(
        f"the run reads {samples} samples in --train-iters {args.train_iters}, and {min(lengths)} are prepared, since "
        f"Megatron-LM leaves --step-batch-size-schedule out of account. Fix: give --train-samples {samples} instead",
        code="samples-too-few",
    )
    return with_code(problem)


class Reports:
    """Reports of Megatron-LM's loss functions, and of its trackers of further losses.

    The first value of a report is the loss of the step record.  The other values and the losses of routers are averaged
    by the commit all-reduce and are the record's auxiliary losses.  Megatron-LM's own log reads its trackers
    afterwards, and clears them in each iteration.

    Args:
        parts: parts of this worker.
        topology: this worker's share of the global batch.

    Attributes:
        loss_name: name of the first value; empty on stages that compute no loss.
        names: names of the other values, once all workers have gathered them.
        load: load of the experts since the last report, if the newest iteration ends a logging interval.
    """

    def __init__(self, parts: WorkerParts, topology: Topology):
        self._world, self._topology = parts.world, topology
        self._is_reporting = parts.world.tensor_rank == 0  # tensor-parallel ranks report the same values
        self.loss_name = ""
        self.names: list[str] | None = None
        self._sums: dict[str, torch.Tensor] = {}
        modules = [module for chunk in parts.chunks for module in chunk.modules()]
        self._routed_layers = sum(isinstance(module, BaseMoELayer) for module in modules)  # here; later on all workers
        self._router_losses: list[str] = []
        self.load: ExpertLoad | None = None
        self._counter = LoadCounter(parts.chunks, parts.world.device, parts.config.moe.moe_pad_expert_input_to_capacity)
        self._layers: list[int] = []

    def close(self) -> None:
        """Stops counting the load of experts."""
        self._counter.close()

    def add(self, report: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Adds the report of a micro batch; returns the loss's sum and weight for the commit all-reduce."""
        if not report:
            raise ConfigError(
                "the loss function reports no value. Fix: report the loss first, as a mean, or a sum and its weight",
                code="loss-report-invalid",
            )
        (self.loss_name, loss), *other_reports = report.items()
        for name, value in other_reports if self._is_reporting else ():
            pair = _sum_and_weight(value)
            self._sums[name] = self._sums[name] + pair if name in self._sums else pair
        total, weight = _sum_and_weight(loss)
        return {"loss_sum": total, "loss_tokens": weight}

    def take(self, iteration: int) -> dict[str, torch.Tensor]:
        """Returns and clears this worker's contributions to the commit all-reduce; the first call is collective."""
        metrics = get_moe_metrics_tracker().metrics
        if self.names is None:  # stages without a loss do not know the names
            losses = [name for name in metrics if name.endswith("loss")]
            stage, layers = self._world.pipeline_rank, self._counter.layers
            gathered = gather((self.loss_name, list(self._sums), losses, stage, self._routed_layers, layers))
            self.loss_name = next((loss for loss, *_ in gathered if loss), "lm loss")
            self.names = sorted({name for _, names, *_ in gathered for name in names})
            self._router_losses = sorted({name for _, _, names, *_ in gathered for name in names})
            self._routed_layers = sum({stage: count for *_, stage, count, _ in gathered}.values())
            self._layers = sorted({layer for *_, numbers in gathered for layer in numbers})
        zero = torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())
        contribution = {}
        for name in self.names:
            total, weight = self._sums.get(name, zero)
            contribution |= {_SUM + name: total, _WEIGHT + name: weight}
        self._micro_batches = self._topology.mean_micro_batches
        for name in self._router_losses:
            contribution[name] = self._share(metrics[name]).sum() / self._routed_layers if name in metrics else zero[0]
        self._sums = {}
        self._counter.keep()
        if self._layers and due(get_args().log_interval, iteration):
            contribution[_LOAD] = self._counter.take(self._layers)
        return contribution

    def drop(self) -> None:
        """Discards an iteration that is not reported."""
        self._sums = {}
        self._counter.drop()
        clear_trackers()

    def means(self, totals: dict[str, Any]) -> dict[str, float]:
        """Returns means of reported values and routers' losses, by name, from the totals of the commit all-reduce."""
        self.load = self._counter.load(self._layers, totals[_LOAD]) if _LOAD in totals else None
        reported = {name: totals[_SUM + name] / max(totals[_WEIGHT + name], 1.0) for name in self.names or ()}
        return reported | {name: totals[name] for name in self._router_losses}

    def _share(self, entry: MetricEntry) -> torch.Tensor:
        """Scales a worker's values so that their sum over all workers is the mean.

        Values that megatron-core reduces over tensor- (and data-) parallel ranks are partial sums; others are replicas.
        """
        values = entry.values.detach().double() / self._micro_batches
        if entry.reduce_group is None:
            return values / (self._world.tensor_size * self._world.data_size)
        return values / self._world.data_size if entry.needs_dp_avg else values


class StockSchedule(Schedule):
    """megatron-core's schedule with Megatron-LM's forward step, and the topology's number of micro batches."""

    def __init__(
        self,
        forward_step: ForwardStep,
        chunks: list[DistributedDataParallel],
        hooks: MicroBatchHooks,
        topology: Topology,
        communicator: P2PCommunicator | None = None,
    ):
        sizes = topology.rounds, topology.micro_batch_size, get_args().seq_length
        super().__init__(forward_step, chunks, hooks, *sizes, communicator)
        self._topology = topology

    def sizes(self) -> dict[str, Any]:
        args = get_args()
        return dict(
            num_microbatches=self._topology.rounds,
            micro_batch_size=args.micro_batch_size,
            seq_length=args.seq_length,
            decoder_seq_length=args.decoder_seq_length,
        )


def reporting(forward_step: Callable[..., Any], reports: Reports) -> ForwardStep:
    """Wraps Megatron-LM's forward step so that the commit all-reduce can sum its reports.

    Args:
        forward_step: ``(iterator, model) -> (output, loss function)``; its report has, for each name, one value (a
            mean) or two values (a sum and its weight).
        reports: receives them.
    """

    def step(batches: Any, chunk: torch.nn.Module, **options: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        output, loss_function = forward_step(batches, chunk, **options)

        def loss(tensor: torch.Tensor, **options: Any) -> tuple[Any, ...]:
            result = loss_function(tensor, **options)
            return (*result[:-1], reports.add(result[-1]))

        return output, loss

    return step


def clear_trackers() -> None:
    """Clears Megatron-LM's sums of router losses and of losses of multi-token prediction."""
    get_moe_metrics_tracker().clear()
    if getattr(get_args(), "mtp_num_layers", None):
        MTPLossLoggingHelper.clean_metrics_in_tracker()


def _sum_and_weight(value: Any) -> torch.Tensor:
    """Returns a value of a report as a sum and its weight: a mean has the weight 1."""
    tensor = value.detach() if torch.is_tensor(value) else torch.tensor(float(value))
    flat = tensor.double().view(-1)
    if flat.numel() == 2:
        return flat.clone()
    if flat.numel() != 1:
        raise ConfigError(
            f"the loss function reports {flat.numel()} values under one name. Fix: report a mean, or a sum and its "
            "weight",
            code="loss-report-invalid",
        )
    return torch.cat([flat, torch.ones_like(flat)])
