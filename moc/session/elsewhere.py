"""What a session may be given beside an engine: other checkpoints to begin from, and what chooses its policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from moc.policy import Observed
from moc.policy.plan import Busiest
from moc.session.engine import Engine
from moc.session.resume.survivors import LocalRemains
from moc.session.settings import Settings
from moc.session.tiers import Tiers
from moc.state.record import Position


class Elsewhere(Protocol):
    """Checkpoints that are no snapshots; all methods are collective."""

    def newest(self, seconds: float | None = None) -> int | None:
        """The iteration that :meth:`load` begins at; None if it finds nothing, or not within so many seconds."""

    def load(self) -> Position | None:
        """Fills the state; None if there is nothing."""


class _Nowhere:
    def newest(self, seconds: float | None = None) -> None:
        return None

    def load(self) -> None:
        return None


NOWHERE = _Nowhere()
"""There are none."""


class Chooser(Protocol):
    """Chooses policy and settings; all methods are for all workers alike.

    Attributes:
        counts_tokens: tokens are counted whatever is in force.
    """

    @property
    def counts_tokens(self) -> bool: ...  # noqa: D102

    def in_force(self, engine: Engine, tiers: Tiers, mine: LocalRemains | None) -> Settings:
        """Takes up what the run knew, and returns what is in force from here on; a collective call."""
        ...

    def on_sizes(self, busiest: Busiest, engine: Engine, may_replay: Callable[[], bool]) -> None:
        """Learns how large snapshots would be.

        Args:
            busiest: the bytes of the rank that saves the most of a plan's operators; a collective call.
            engine: with its operators.
            may_replay: whether iterations can be computed again with frozen operators; a collective call.
        """

    def observe(self, seen: Observed) -> None:
        """Learns what one iteration has shown."""

    def state_dict(self) -> dict[str, Any]:
        """What is stored with snapshots, as JSON can hold it."""
        ...
