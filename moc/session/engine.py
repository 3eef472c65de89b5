"""What a session asks of an engine, the program that computes iterations and updates the state.

megatron-core's is :class:`megatron.pretraining.engine.megatron.MegatronEngine`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from moc.events import EventLog
from moc.policy import SnapshotPlan
from moc.runtime.world import World
from moc.state.fragments import Fragment
from moc.state.interface import TrainingState
from moc.state.operators import Operator
from moc.state.record import Position, StepRecord

Gradients = Callable[[Fragment], torch.Tensor]
"""Gives the reduced gradient of each fragment of detail ``GRAD``, as it was kept or logged."""


class Listener(Protocol):
    """Where a session reports.

    Attributes:
        events: for programs.
    """

    @property
    def events(self) -> EventLog: ...  # noqa: D102

    def message(self, text: str) -> None:
        """Reports a line for people, once for all workers."""


class PipelineTap(Protocol):
    """What crosses the pipeline stages, where it is logged; all methods do nothing where it is not.

    Attributes:
        gauges: what there is to see of every iteration.
        feeds: by stage, the stages from whose logs it can be computed again; empty where nothing is logged.
    """

    @property
    def gauges(self) -> Mapping[str, float]: ...  # noqa: D102

    @property
    def feeds(self) -> Mapping[int, Collection[int]]: ...  # noqa: D102

    def open(self, memory: Path) -> None:
        """Makes what is needed in the memory of this node; no collective.

        Raises:
            CheckpointError: there is not so much memory.
        """

    def ballot(self) -> dict[str, float]:
        """As :meth:`VoteParticipant.ballot`."""
        ...

    def on_vote(self, tally: Mapping[str, float]) -> None:
        """As :meth:`VoteParticipant.on_vote`."""

    def on_stored(self, plan: SnapshotPlan) -> None:
        """A snapshot is safe, and so are all that were taken before it."""

    def close(self) -> None:
        """Ends what is under way; logs stay."""

    def delete(self) -> None:
        """Removes the logs: there is nothing left that would need them."""

    def kept(self) -> list[int]:
        """Iterations of which this worker's log is there, counted from 1."""
        ...

    def damaged(self, served: Mapping[int, Collection[int]]) -> list[int]:
        """Of iterations, each with the stages that compute it, those that this worker cannot :meth:`serve`."""
        ...

    def serve(self, iteration: int, stages: Collection[int]) -> None:
        """Sends to stages that compute an iteration again what this worker sent them then."""

    def replaying(self, stages: Collection[int]) -> AbstractContextManager[None]:
        """While only some stages compute, and this worker's is one of them; none where all do, as ever."""
        ...


class RouterTally(Protocol):
    """Counts the tokens that each expert was given."""

    def take(self) -> dict:
        """This worker's counts since the last call, for the vote."""
        ...

    def by_layer(self, tally: dict) -> tuple[dict[int, list[int]], dict[int, int]]:
        """From the sums over all workers: by layer the tokens of each expert, and those that were to be routed."""
        ...

    def probabilities(self, tally: dict) -> dict[int, list[float]]:
        """By layer and expert, the sum of the probabilities with which it was chosen."""
        ...

    def close(self) -> None:
        """Counts no more."""


class Outcome(NamedTuple):
    """What an iteration that was computed again has shown to this worker.

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
        state: what it trains.
        operators: of the whole model, in the order of the forward pass.
        stages: by layer, the pipeline stage that computes it.
        layout: sizes of the layout by name, for people who read manifests.
        peers: the workers of this pipeline stage, who may hold copies of one another; None where they are all.
        slices: ranks that hold the other tensor-parallel slices of what this one holds, with this one.
        tap: what crosses pipeline stages.
        reduced: iteration of which it still has the reduced gradients; None if it has none.
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
        """What of the state is not a tensor, at a position, as JSON can hold it; the position is part of it."""
        ...

    def load_scalars(self, saved: Mapping, where: str) -> None:
        """Restores what :meth:`scalars` gave.

        Args:
            saved: that.
            where: the snapshot, for messages.

        Raises:
            CheckpointError: the flags ask for something else.
        """

    def check(self, saved: Mapping, where: str, window: bool = False) -> None:
        """Refuses the state of another model or optimizer, and a window that computes in another precision.

        Args:
            saved: what :meth:`scalars` gave.
            where: the snapshot, for messages.
            window: iterations are to be computed again from it.

        Raises:
            CheckpointError: it is of another one.
        """

    def compare_samples(self, saved: Mapping, say: Callable[[str], None]) -> None:
        """Warns where samples come in another order than in the run that saved."""

    def replay(
        self, record: StepRecord, position: Position, completing: Callable[[], AbstractContextManager]
    ) -> Outcome:
        """Computes an iteration again that is known by its record; what is frozen then does not change.

        Args:
            record: of the iteration.
            position: before it.
            completing: to be entered once the gradients are reduced, and left once the update is done.

        Returns:
            What it has shown; the parts of all workers are bit by bit those of the record, where layout, data and
            kernels are the same.
        """
        ...

    def apply(self, record: StepRecord, gradients: Gradients | None = None) -> None:
        """Updates the state of what is not frozen by the decision of the vote: no forward, no backward, no collective.

        Loss scale and learning rate are to be those of the iteration.  What moves without gradients, such as biases of
        routers, stays where gradients are given, and is to be loaded; weights are to be gathered afterwards.

        Args:
            record: of the iteration.
            gradients: of the iteration; by default those that it still has, see ``reduced``.
        """

    def router_tally(self, layers: Sequence[int], with_probabilities: bool) -> RouterTally:
        """Counts what routers do from now on.

        Args:
            layers: numbers of those with experts.
            with_probabilities: count, too, with what probabilities routers choose.
        """
        ...
