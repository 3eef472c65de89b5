"""Computes one training iteration and commits it.

1. forward and backward of all micro batches (:mod:`megatron.pretraining.engine.schedule`);
2. reduce: gradients are reduced, and kept until the next iteration starts;
3. **commit all-reduce**: one small all-reduce over all workers.  No worker passes it before every worker holds its
   reduced gradients.  So if a worker has the totals of iteration t, all can complete iteration t;
4. apply: every worker makes the same decision from the same totals, without a collective that could separate them;
5. record: the step record holds everything except tensors that a replay of the iteration needs;
6. gather: with ZeRO-1, updated weights are all-gathered.  A worker interrupted here has completed the iteration:
   recovery repeats the gather.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.pretraining.data.streams import Batch
from megatron.pretraining.engine.module_state import ModuleState
from megatron.pretraining.engine.optimizer import CommitOptimizer
from megatron.pretraining.engine.routing import AuxiliaryLosses
from megatron.pretraining.engine.schedule import Schedule
from megatron.pretraining.engine.upstream import UpstreamTap
from megatron.pretraining.process.topology import Topology
from moc.errors import UserError
from moc.fault_points import reach
from moc.runtime.collectives import sum_over_workers
from moc.runtime.job import World
from moc.runtime.progress import progress
from moc.session.engine import CommitParticipant
from moc.state.record import StepRecord, mean_loss


class NonFiniteError(UserError, RuntimeError):
    """The loss or gradients of an iteration are not finite; raised on all workers together."""

    code = "loss-not-finite"


@dataclass(frozen=True)
class Stepper:
    """Computes iterations with the parts of a worker, and commits each by one all-reduce over all workers.

    Attributes:
        topology: rank and groups of this worker.
        chunks: model chunks of its pipeline stages, in order.
        modules: undo log of values in modules that an iteration changes.
        schedule: megatron-core's schedule of micro batches.
        optimizer: clips and updates as the totals of the commit all-reduce require.
        scheduler: learning rate and weight decay.
        auxiliary: auxiliary losses of routers.
        boundaries: log of the tensors sent between stages.
        count_zeros: whether the record has the number of zeros in gradients.
        params_norm: whether the record has the norm of parameters.
        refuse_non_finite: whether a loss or gradient that is not finite stops all workers.
        participants: contribute values to the commit all-reduce, and receive its totals.
    """

    topology: Topology
    chunks: list[DistributedDataParallel]
    modules: ModuleState
    schedule: Schedule
    optimizer: CommitOptimizer
    scheduler: OptimizerParamScheduler
    auxiliary: AuxiliaryLosses
    boundaries: UpstreamTap
    count_zeros: bool = False
    params_norm: bool = False
    refuse_non_finite: bool = True
    participants: tuple[CommitParticipant, ...] = ()

    @property
    def world(self) -> World:
        """Rank and groups of this worker."""
        return self.topology.world

    def step(self, iteration: int, batches: Iterator[Batch] | None, stop: bool = False) -> StepRecord:
        """Computes and commits the iteration after ``iteration`` completed ones; call :meth:`gather_weights` next.

        Args:
            iteration: iterations completed before this one.
            batches: this worker's micro batches; None on stages that read no data.
            stop: whether this worker requests a stop of all workers after this iteration.

        Raises:
            NonFiniteError: on all workers, if the loss or a gradient is not finite and ``refuse_non_finite`` is set;
                no parameter has changed.
        """
        reach("start", iteration + 1)
        reports = self.reduced_gradients(iteration, batches)
        reach("after_reduce")
        totals = self._all_reduce(iteration + 1, reports, stop)  # after this, all workers can complete the iteration
        reach("after_commit")
        record = self._decide(iteration, totals)
        progress("save")
        for participant in self.participants:  # a snapshot in progress reads state that the update is about to change
            participant.on_totals(totals)
        progress("step")
        self.complete(record)
        reach("after_apply")
        return record

    def repeat(
        self,
        record: StepRecord,
        batches: Iterator[Batch] | None,
        completing: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ) -> dict[str, torch.Tensor]:
        """Replays an iteration from its step record; frozen operators do not change.

        Gradients are clipped by the recorded norm: frozen operators have no gradients to contribute to a norm, and
        stages that replay without the others have only their own.  Loss scale and learning rate must match the
        iteration.  ``completing`` is entered for the update, while the state is between two iterations.

        Returns:
            This worker's part of the loss.  With the same layout, data and kernels, the parts of all workers sum to the
            recorded loss, bit for bit.
        """
        reports = self.reduced_gradients(record.iteration - 1, batches, record.tokens)
        self.auxiliary.drop()
        with completing():
            self.complete(record)
        self.gather_weights()
        return sum_losses(reports, self.world)

    def complete(self, record: StepRecord) -> None:
        """Updates the state according to the totals in the record, once gradients are reduced."""
        self.optimizer.apply(record.grad_norm)
        self.modules.commit(record.skipped)
        if not record.skipped:
            self.scheduler.step(record.samples)

    def gather_weights(self) -> None:
        """With ZeRO-1, all-gathers the updated weights from the data-parallel peers."""
        self.optimizer.gather_weights()

    def reduced_gradients(
        self, iteration: int, batches: Iterator[Batch] | None, tokens: int | None = None
    ) -> list[dict]:
        """Computes the iteration after ``iteration`` completed ones up to its reduced gradients.

        A replay passes ``tokens``, the loss tokens over all ranks.  Returns the loss function's report of each micro
        batch (last stage, otherwise empty).
        """
        self.modules.begin()
        self.optimizer.zero_grad()
        with self.boundaries.crossed(iteration + 1) as communicator:
            reports, token_count = self.schedule.forward_backward(iteration, batches, communicator)
        self.boundaries.reduce(self.chunks, token_count, tokens)
        self.optimizer.take_gradients()
        self.optimizer.reduced = iteration + 1
        return reports

    def _all_reduce(self, iteration: int, reports: list[dict], stop: bool) -> dict[str, float]:
        contribution = {
            **self.optimizer.norm_contribution(),
            **sum_losses(reports, self.world),
            "stop": float(stop),
            **self.auxiliary.take(iteration),
        }
        for participant in self.participants:
            contribution |= participant.contribution()
        if self.count_zeros:
            contribution["zeros"] = self.optimizer.count_zeros()
        if self.params_norm:
            contribution["params_square_norm"] = self.optimizer.local_params_square_norm()
        reach("before_commit")
        with self.boundaries.waiting():  # stages that finish early wait here
            return sum_over_workers(contribution, self.world)

    def _decide(self, iteration: int, totals: dict[str, float]) -> StepRecord:
        norm, loss = self.optimizer.total_norm(totals), mean_loss(totals)
        skipped = not math.isfinite(norm)
        record = StepRecord(
            iteration=iteration + 1,
            loss=loss,
            grad_norm=norm,
            loss_scale=self.optimizer.loss_scale,
            skipped=skipped,
            tokens=int(totals["loss_tokens"]),
            learning_rate=self.optimizer.learning_rate,
            samples=self.topology.global_batch_size,
            zeros=int(totals["zeros"]) if self.count_zeros else None,
            params_norm=math.sqrt(totals["params_square_norm"]) if self.params_norm else None,
            stop=totals["stop"] > 0,
            auxiliary=self.auxiliary.means(totals),
        )
        if self.refuse_non_finite and (skipped or not math.isfinite(loss)):
            self.modules.discard()
            raise NonFiniteError(
                f"iteration {record.iteration}: loss {loss} and gradient norm {record.grad_norm} are not finite; "
                "no weight has moved. Fix: lower --lr, look at the data, or let such iterations be skipped "
                "with --no-check-for-nan-in-loss-and-grad"
            )
        return record


def sum_losses(reports: list[dict], world: World) -> dict[str, torch.Tensor]:
    """Sums this worker's micro batches (``loss_sum``, ``loss_tokens``); tensor-parallel replicas count once."""
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    if world.tensor_rank == 0:
        for report in reports:
            total += torch.stack([report["loss_sum"].double(), report["loss_tokens"].double()])
    return {"loss_sum": total[0], "loss_tokens": total[1]}
