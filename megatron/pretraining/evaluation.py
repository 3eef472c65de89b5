"""Computes the validation and test loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron.pretraining.data.streams import Batch
from megatron.pretraining.engine.step import Stepper, sum_losses
from megatron.pretraining.process.stopping import StopRequests
from moc.fault_points import reach
from moc.runtime.collectives import sum_over_workers
from moc.runtime.progress import progress


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
