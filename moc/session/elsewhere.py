"""Optional inputs of a session beside its engine: other checkpoints to start from, and a chooser of its policy."""

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
    """Checkpoints that are not snapshots; every method is collective."""

    def newest(self, seconds: float | None = None) -> int | None:
        """Returns the iteration that :meth:`load` would resume from; None if it finds none, or none in time."""

    def load(self) -> Position | None:
        """Fills the state; returns None if there is no checkpoint."""


class _Nowhere:
    def newest(self, seconds: float | None = None) -> None:
        return None

    def load(self) -> None:
        return None


NOWHERE = _Nowhere()
"""No such checkpoints."""


class Chooser(Protocol):
    """Chooses policy and settings; every worker calls every method.

    Attributes:
        counts_tokens: tokens are counted under every policy.
    """

    @property
    def counts_tokens(self) -> bool: ...  # noqa: D102

    def in_force(self, engine: Engine, tiers: Tiers, mine: LocalRemains | None) -> Settings:
        """Restores measurements and choice, and returns the settings in force from here on; a collective call."""
        ...

    def on_sizes(self, busiest: Busiest, engine: Engine, may_replay: Callable[[], bool]) -> None:
        """Receives the functions that give snapshot sizes.

        Args:
            busiest: returns the bytes that the busiest rank saves of a plan's operators; a collective call.
            engine: whose operators are saved.
            may_replay: returns whether iterations can be replayed with frozen operators; a collective call.
        """

    def observe(self, seen: Observed) -> None:
        """Records the measurements of one iteration."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to store with snapshots, as JSON-compatible values."""
        ...
