"""What a session requires of an engine, the program that computes iterations and updates the state.

For megatron-core it is :class:`megatron.pretraining.engine.megatron.MegatronEngine`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from moc.events import EventLog
from moc.policy import SnapshotPlan
from moc.runtime.world import World
from moc.snapshot.bubbles import Bubbles
from moc.state.adam import Rules
from moc.state.fragments import Fragment
from moc.state.interface import TrainingState
from moc.state.operators import Operator
from moc.state.record import Position, StepRecord

Gradients = Callable[[Fragment], torch.Tensor]
"""Returns the reduced gradient of a fragment of detail ``GRAD``, kept in memory or logged."""


class Listener(Protocol):
    """Receives a session's messages and events.

    Attributes:
        events: for programs.
    """

    @property
    def events(self) -> EventLog: ...  # noqa: D102

    def message(self, text: str) -> None:
        """Prints a line for people, once for all workers.

        The text may contain names of files: :func:`moc.output.print_lines` escapes what terminals would obey.
        """


class VoteParticipant:
    """A participant in the vote of each iteration.  The default contributes nothing."""

    def ballot(self) -> dict[str, float]:
        """Returns this worker's contribution to the vote; the names are identical on all workers."""
        return {}

    def on_vote(self, tally: dict[str, float]) -> None:
        """Receives the sums over all workers, right before the update; may raise, then on all workers."""


class PipelineTap(VoteParticipant):
    """Logs what crosses pipeline stages, and times waits for it.  By default nothing is logged."""

    gauges: Mapping[str, float] = MappingProxyType({})
    """Values to report with every iteration."""
    feeds: Mapping[int, Collection[int]] = MappingProxyType({})
    """By stage, the stages whose logs it needs for a replay; empty without logging."""
    bubbles: Bubbles | None = None
    """Where waits for other stages are timed, and snapshots copy in them first; None if neither is wanted."""

    def computing(self) -> AbstractContextManager[None]:
        """Context of an iteration's forward and backward."""
        return contextlib.nullcontext() if self.bubbles is None else self.bubbles.computing()

    def waiting(self) -> AbstractContextManager[None]:
        """Context in which this worker waits for other stages."""
        return contextlib.nullcontext() if self.bubbles is None else self.bubbles.waiting()

    def open(self, memory: Path) -> None:
        """Allocates the logs in the memory of this node; no collective call.

        Raises:
            CheckpointError: the node has too little memory.
        """

    def bytes_for(self, iterations: int) -> int:
        """Returns the bytes of the logs after :meth:`reserve`."""
        return 0

    def reserve(self, iterations: int) -> None:
        """Allocates the logs of so many iterations, up to their limit; no collective call.

        Raises:
            CheckpointError: the node has too little memory.
        """

    def on_stored(self, plan: SnapshotPlan) -> None:
        """A snapshot is safe, and so are all earlier ones."""

    def close(self) -> None:
        """Ends pending work; the logs stay."""

    def delete(self) -> None:
        """Removes the logs: no recovery needs them any more."""

    def kept(self) -> list[int]:
        """Returns the iterations that this worker has logs of, counted from 1."""
        return []

    def damaged(self, served: Mapping[int, Collection[int]]) -> list[int]:
        """Returns the iterations that this worker cannot :meth:`serve`, of those given with their replaying stages."""
        return []

    def serve(self, iteration: int, stages: Collection[int]) -> None:
        """Sends this worker's logged output of an iteration to the stages that replay it."""

    @contextlib.contextmanager
    def replaying(self, stages: Collection[int]) -> Iterator[None]:
        """Context in which only these stages compute, this worker's among them; without any, all stages compute."""
        yield


class NoTap(PipelineTap):
    """The tap of a pipeline without upstream logs."""


class RouterTally(Protocol):
    """Counts the tokens routed to each expert."""

    def take(self) -> dict:
        """Returns this worker's counts since the last call, for the vote."""
        ...

    def by_layer(self, tally: dict) -> tuple[dict[int, list[int]], dict[int, int]]:
        """Returns, from the sums over all workers, by layer: the tokens of each expert, and the tokens to be routed."""
        ...

    def probabilities(self, tally: dict) -> dict[int, list[float]]:
        """Returns, by layer and expert, the sum of the probabilities with which the expert was chosen."""
        ...

    def boost(self, owed: Mapping[int, Sequence[int]], fraction: float) -> None:
        """From now on, lets experts that owe tokens, by layer and expert, process more than their capacity.

        By at most this fraction, and no more than the other experts of their rank leave unused; nobody routes
        differently because of it.  If nothing is owed, all is as it was before.  Not called where ``makes_up`` is None.
        """

    def beyond(self, tally: dict) -> dict[int, list[int]]:
        """Returns, by layer, the tokens that each expert processed beyond its capacity; empty if none was boosted."""
        ...

    def close(self) -> None:
        """Stops counting, and boosting."""


class Outcome(NamedTuple):
    """What this worker saw of a replayed iteration.

    Attributes:
        sums: this worker's part of the loss, as in the vote.
        learning_rate: of its update.
    """

    sums: dict[str, float]
    learning_rate: float


class Engine(Protocol):
    """One worker's part of a model in training.

    Attributes:
        world: this worker's place.
        state: the training state.
        operators: of the whole model, in the order of the forward pass.
        stages: by layer, the pipeline stage that computes it.
        layout: sizes of the layout by name, for people who read manifests.
        peers: workers of this pipeline stage, the only ones that may be replicas of one another; None for all workers.
        slices: ranks that hold the tensor-parallel slices of this worker's state, its own included.
        tap: logs what crosses pipeline stages.
        reduced: iteration whose reduced gradients the engine still has; None if there is none.
    """

    @property
    def world(self) -> World: ...  # noqa: D102

    @property
    def state(self) -> TrainingState: ...  # noqa: D102

    @property
    def operators(self) -> Sequence[Operator]: ...  # noqa: D102

    @property
    def stages(self) -> Sequence[int]: ...  # noqa: D102

    @property
    def layout(self) -> Mapping[str, int]: ...  # noqa: D102

    @property
    def peers(self) -> dist.ProcessGroup | None: ...  # noqa: D102

    @property
    def slices(self) -> Sequence[int]: ...  # noqa: D102

    @property
    def tap(self) -> PipelineTap: ...  # noqa: D102

    @property
    def reduced(self) -> int | None: ...  # noqa: D102

    def scalars(self, position: Position) -> dict:
        """Returns the non-tensor state at a position as JSON-compatible values, including the position."""
        ...

    def load_scalars(self, saved: Mapping, where: str) -> None:
        """Restores the result of :meth:`scalars`, saved in the snapshot that ``where`` names.

        Raises:
            CheckpointError: the flags contradict the saved values.
        """

    def check(self, saved: Mapping, where: str, window: bool = False) -> None:
        """Refuses the snapshot that ``where`` names, if invalid, or of another model or optimizer; changes nothing.

        If iterations are to be replayed from it (``window``), it refuses one of another precision, too.  An older
        snapshot is used instead, if there is one.

        Raises:
            CheckpointError: model, optimizer or precision differs.
            ValueError: a value of :meth:`scalars` is missing or invalid.
        """

    def compare_samples(self, saved: Mapping, say: Callable[[str], None]) -> None:
        """Warns if the order of samples differs from the run that saved the state."""

    def replay(
        self, record: StepRecord, position: Position, completing: Callable[[], AbstractContextManager]
    ) -> Outcome:
        """Replays the iteration after a position by its step record; frozen operators do not change.

        ``completing`` gives a context to enter once the gradients are reduced, and to leave once the update is done.
        With the same layout, data and kernels, what all workers saw is bit-identical to the record.
        """
        ...

    def apply(
        self, record: StepRecord, gradients: Gradients | None = None, operators: Collection[str] | None = None
    ) -> None:
        """Updates what is not frozen, by the decision of the vote: no forward, no backward, no collective.

        Loss scale and learning rate must be those of the iteration.  By default the gradients are those still in
        memory, see ``reduced``.  With ``gradients``, state that moves without gradients, such as router biases, stays
        as it is, and must be loaded; and with ``operators``, only these are updated.  Weights must be gathered
        afterwards.
        """

    def rules(self) -> Rules:
        """Returns how the next update treats experts on this worker, if it is Adam's, in fp32; absent ones are another.

        Not called unless gradients are folded beside training.
        """
        ...

    def router_tally(self, layers: Sequence[int], with_probabilities: bool) -> RouterTally:
        """Counts the decisions of these layers' routers, and sums the probabilities of the chosen experts on demand."""
        ...
