"""Runs the pipeline schedule of one iteration: megatron-core's, with this project's micro batches and communicator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron.pretraining.data.streams import Batch
from megatron.pretraining.engine.boundary import schedule_groups
from megatron.pretraining.process.initialize import seed_streams
from megatron.pretraining.process.topology import Topology
from moc.faults import reach

ForwardStep = Callable[[Iterator[Batch] | None, torch.nn.Module], tuple[torch.Tensor, Callable]]


class Turns:
    """Hooks around the micro batches of an iteration; this class seeds random streams as it begins."""

    def __init__(self, seed: int, topology: Topology):
        self._seed, self._topology = seed, topology

    def begin(self, iteration: int | None) -> None:
        """Begins the iteration after ``iteration`` completed ones, or with None an evaluation, which uses no seed."""
        if iteration is not None:
            seed_streams(self._seed, iteration, self._topology.world)

    def take(self, compute: Callable[[], tuple[torch.Tensor, Callable]]) -> tuple[torch.Tensor, Callable]:
        """Computes the forward pass of the next micro batch; returns its output and the output's loss function."""
        return compute()


class Schedule:
    """Runs forward and backward of all micro batches of an iteration.

    ``forward_step`` is ``(micro batches, model chunk) -> (output, loss function of the output)``, as megatron-core's
    schedules call it; it draws a batch only on chunks that need one.  ``alone`` replaces any communicator, on workers
    without neighbours in a pipeline.
    """

    def __init__(
        self,
        forward_step: ForwardStep,
        chunks: list[DistributedDataParallel],
        turns: Turns,
        num_micro_batches: int,
        micro_batch_size: int,
        seq_length: int,
        alone: P2PCommunicator | None = None,
    ):
        self._forward_step, self._chunks, self._turns, self._alone = forward_step, chunks, turns, alone
        self._sizes: dict[str, Any] = dict(
            num_microbatches=num_micro_batches, micro_batch_size=micro_batch_size, seq_length=seq_length
        )
        self._tokens = None
        # step.py reduces gradients itself; the schedule only reports the token count
        chunks[0].config.finalize_model_grads_func = self._note_tokens

    def forward_backward(
        self, iteration: int, batches: Iterator[Batch] | None, communicator: P2PCommunicator | None = None
    ) -> tuple[list[dict], torch.Tensor | None]:
        """Computes all gradients of the iteration after ``iteration`` completed ones, unreduced.

        ``batches`` is None on stages that read no data.

        Returns:
            The loss function's report of each micro batch (last stage; else empty), and the number of tokens by which
            to divide this rank's gradients, or None if they are already averaged.
        """
        self._turns.begin(iteration)
        reports = self._run(batches, forward_only=False, communicator=communicator)
        return reports, self._tokens

    def forward(self, batches: Iterator[Batch] | None) -> list[dict]:
        """Computes the losses only (evaluation)."""
        self._turns.begin(None)
        return self._run(batches, forward_only=True)

    def _run(self, batches, forward_only: bool, communicator: P2PCommunicator | None = None) -> list[dict]:
        # one iterator instead of a list: at most one chunk of a worker is the model's first or last
        several, communicator = len(self._chunks) > 1, self._alone or communicator
        tap: dict[str, Any] = (
            {} if communicator is None else dict(p2p_communicator=communicator, pg_collection=schedule_groups())
        )
        return get_forward_backward_func()(
            forward_step_func=self._one_micro_batch,
            data_iterator=[batches] * len(self._chunks) if several and not isinstance(batches, list) else batches,
            model=[*self._chunks] if several else self._chunks[0],
            forward_only=forward_only,
            **tap,
            **self.sizes(),
        )

    def sizes(self) -> dict[str, Any]:
        """Returns the schedule's arguments about the micro batches of an iteration, by name."""
        return self._sizes

    def _one_micro_batch(self, batches, chunk) -> tuple[torch.Tensor, Callable]:
        reach("forward_backward")
        return self._turns.take(lambda: self._forward_step(batches, chunk))

    def _note_tokens(self, chunks, tokens=None, **ignored) -> None:
        self._tokens = tokens
