"""Defines the engine of a session: the program that computes iterations and updates the state.

For megatron-core it is :class:`megatron.pretraining.engine.megatron.MegatronEngine`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from moc.events import EventLog
from moc.policy import SnapshotPlan
from moc.runtime.job import World
from moc.snapshot.device_copy import BubbleGate
from moc.state.adam import Rules
from moc.state.interface import TrainingState
from moc.state.operators import Fragment, Operator
from moc.state.record import Position, StepRecord

Gradients = Callable[[Fragment], torch.Tensor]
"""Returns the reduced gradient of a tensor chunk with detail ``GRAD``, kept in memory or logged."""


class Listener(Protocol):
    """Receiver of a session's messages and events.

    Attributes:
        events: machine-readable log.
    """

    @property
    def events(self) -> EventLog: ...

    def message(self, text: str) -> None:
        """Prints a line for users, once for all workers.

        The text may contain file names: :func:`moc.cli_output.print_lines` escapes control characters.
        """


class CommitParticipant:
    """Participant in the commit all-reduce of each iteration.  The default contributes nothing."""

    def contribution(self) -> dict[str, Any]:
        """Returns this worker's contribution, numbers and 1-D tensors; the names are identical on all workers."""
        return {}

    def on_totals(self, totals: dict[str, Any]) -> None:
        """Receives the totals over all workers, right before the update; may raise, then on all workers."""


class PipelineTap(CommitParticipant):
    """Logs of the traffic between pipeline stages, and timing of waits for it.  By default, nothing is logged."""

    gauges: Mapping[str, float] = MappingProxyType({})
    """Values to report with every iteration."""
    feeds: Mapping[int, Collection[int]] = MappingProxyType({})
    """By stage, the stages whose logs it needs for a replay; empty without logging."""
    bubbles: BubbleGate | None = None
    """Times waits for other stages, during which snapshots are copied first; None if neither is wanted."""

    def computing(self) -> AbstractContextManager[None]:
        """Context of an iteration's forward and backward."""
        return contextlib.nullcontext() if self.bubbles is None else self.bubbles.computing()

    def waiting(self) -> AbstractContextManager[None]:
        """Context of this worker's waits for other stages."""
        return contextlib.nullcontext() if self.bubbles is None else self.bubbles.waiting()

    def open(self, memory: Path) -> None:
        """Allocates the logs in the memory of this node; not collective.

        Raises:
            CheckpointError: the node has too little memory.
        """

    def bytes_for(self, iterations: int) -> int:
        """Returns the bytes of the logs after :meth:`reserve`."""
        return 0

    def reserve(self, iterations: int) -> None:
        """Allocates the logs of this many iterations, up to their limit; not collective.

        Raises:
            CheckpointError: the node has too little memory.
        """

    def on_stored(self, plan: SnapshotPlan) -> None:
        """Records that a snapshot and all earlier ones are durable."""

    def close(self) -> None:
        """Ends pending work, and keeps the logs."""

    def delete(self) -> None:
        """Removes the logs, which no recovery needs any more."""

    def kept(self) -> list[int]:
        """Returns the iterations that this worker has logs of, counted from 1."""
        return []

    def damaged(self, served: Mapping[int, Collection[int]]) -> list[int]:
        """Returns the given iterations that this worker cannot :meth:`serve` to their replaying stages."""
        return []

    def serve(self, iteration: int, stages: Collection[int]) -> None:
        """Sends this worker's logged output of an iteration to the stages that replay it."""

    @contextlib.contextmanager
    def replaying(self, stages: Collection[int]) -> Iterator[None]:
        """Context that restricts computation to these stages, this worker's included; without any, all compute."""
        yield


class NoTap(PipelineTap):
    """Tap of a pipeline without upstream logs."""


class RouterTally(Protocol):
    """Counter of the tokens routed to each expert."""

    def take(self) -> dict:
        """Returns this worker's counts since the last call, for the commit all-reduce."""
        ...

    def by_layer(self, totals: dict) -> tuple[dict[int, list[int]], dict[int, int]]:
        """Returns, by layer, the tokens of each expert, and the tokens to be routed, from the sums over all workers."""
        ...

    def probabilities(self, totals: dict) -> dict[int, list[float]]:
        """Returns, by layer and expert, the sum of the gating probabilities over the expert's tokens."""
        ...

    def boost(self, debt: Mapping[int, Sequence[int]], fraction: float) -> None:
        """Lets experts that owe tokens, by layer and expert, process more than their capacity from now on.

        The excess is at most this fraction, and at most the unused capacity of the other experts of their rank.
        Routing does not change.  If nothing is owed, the original capacity applies.  Not called without a
        :attr:`~moc.policy.RecoveryResponse.capacity_boost`.
        """

    def beyond(self, totals: dict) -> dict[int, list[int]]:
        """Returns, by layer, the tokens that each expert processed beyond its capacity; empty if none was boosted."""
        ...

    def close(self) -> None:
        """Stops counting and boosting."""


class ReplayOutcome(NamedTuple):
    """Results of a replayed iteration on this worker.

    Attributes:
        sums: this worker's part of the loss, as in the commit all-reduce.
        learning_rate: learning rate of its update.
    """

    sums: dict[str, float]
    learning_rate: float


class Engine(Protocol):
    """One worker's part of a model in training.

    Attributes:
        world: this worker's ranks, device and job.
        state: the training state.
        operators: operators of the entire model, in forward order.
        stages: by layer, the pipeline stage that computes it.
        layout: sizes of the layout by name, for users who read manifests.
        peers: workers of this pipeline stage, the only ones that may be replicas of one another; None for all workers.
        slices: ranks with the tensor-parallel slices of this worker's state, its own included.
        tap: logs of the traffic between pipeline stages.
        reduced: iteration whose reduced gradients the engine still has; None if there is none.
    """

    @property
    def world(self) -> World: ...

    @property
    def state(self) -> TrainingState: ...

    @property
    def operators(self) -> Sequence[Operator]: ...

    @property
    def stages(self) -> Sequence[int]: ...

    @property
    def layout(self) -> Mapping[str, int]: ...

    @property
    def peers(self) -> dist.ProcessGroup | None: ...

    @property
    def slices(self) -> Sequence[int]: ...

    @property
    def tap(self) -> PipelineTap: ...

    @property
    def reduced(self) -> int | None: ...

    def scalars(self, position: Position) -> dict:
        """Returns the non-tensor state at a position as JSON-compatible values, including the position."""
        ...

    def load_scalars(self, saved: Mapping, where: str) -> None:
        """Restores the result of :meth:`scalars` from the snapshot that ``where`` names.

        Raises:
            CheckpointError: the flags contradict the saved values.
        """

    def check(self, saved: Mapping, where: str, window: bool = False) -> None:
        """Refuses the snapshot ``where`` if it is invalid, or of another model or optimizer; changes nothing.

        For a replay (``window``), it also refuses another precision.  An older snapshot is then used, if there is one.

        Raises:
            CheckpointError: model, optimizer or precision differs.
            ValueError: a value of :meth:`scalars` is missing or invalid.
        """

    def compare_samples(self, saved: Mapping, say: Callable[[str], None]) -> None:
        """Warns if the order of samples differs from the run that saved the state."""

    def replay(
        self, record: StepRecord, position: Position, completing: Callable[[], AbstractContextManager]
    ) -> ReplayOutcome:
        """Replays the iteration after a position by its step record; frozen operators do not change.

        ``completing`` returns a context to enter once the gradients are reduced, and to leave after the update.  With
        the same layout, data and kernels, the combined outcomes of all workers are bit-identical to the record.
        """
        ...

    def apply(
        self, record: StepRecord, gradients: Gradients | None = None, operators: Collection[str] | None = None
    ) -> None:
        """Updates operators that are not frozen, as recorded: no forward, no backward, no collective.

        Loss scale and learning rate must match the iteration.  Weights must be gathered afterwards.

        Args:
            record: decisions of the iteration.
            gradients: reduced gradients; None for those in memory (``reduced``).  If given, state that changes without
                gradients, such as router biases, is not updated and must be loaded.
            operators: names of the operators to update; None for all.
        """

    def rules(self) -> Rules:
        """Returns the rules of the next update for this worker's experts that Adam updates in fp32, and no others.

        Called only if gradients are applied in the background.
        """
        ...

    def router_tally(self, layers: Sequence[int], with_probabilities: bool) -> RouterTally:
        """Starts to count the tokens that these layers' routers send to each expert on this worker.

        Args:
            layers: numbers of layers with experts, from 0.
            with_probabilities: also sum the gating probabilities of the chosen experts.
        """
        ...
