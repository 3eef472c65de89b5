"""Defines optional inputs of a session: other checkpoints to start from, and a chooser of the policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from moc.policy import ObservedIteration
from moc.policy.interface import SnapshotSizer
from moc.session.engine import Engine
from moc.session.resume.survivors import LocalRemains
from moc.session.settings import Settings
from moc.session.tiers import Tiers
from moc.state.record import Position


class Elsewhere(Protocol):
    """Checkpoints that are not snapshots; every method is collective."""

    def newest(self, seconds: float | None = None, run: str = "") -> int | None:
        """Returns the iteration that :meth:`load` would resume the run from; None if none is found, or not in time.

        ``run`` is the run of the snapshots.
        """

    def check(self, iteration: int, run: str) -> None:
        """Checks that a run that begins at an iteration replaces no checkpoint of another run; raises otherwise."""

    def load(self) -> Position | None:
        """Fills the state, and returns its position; None if there is no checkpoint."""


class _Nowhere(Elsewhere):
    """Absence of such checkpoints: the methods return None."""


NOWHERE = _Nowhere()


class Chooser(Protocol):
    """Chooser of policy and settings; every worker calls every method.

    Attributes:
        counts_tokens: tokens are counted under every policy.
    """

    @property
    def counts_tokens(self) -> bool: ...

    def in_force(self, engine: Engine, tiers: Tiers, local: LocalRemains | None) -> Settings:
        """Restores measurements and choice, and returns the settings in force; a collective call."""
        ...

    def on_sizes(self, busiest: SnapshotSizer, engine: Engine, may_replay: Callable[[], bool]) -> None:
        """Receives functions for snapshot sizes and for the feasibility of a replay; both are collective calls.

        ``busiest`` returns the bytes of a plan's operators on the rank that saves the most.  ``may_replay`` returns
        whether iterations can be replayed with frozen operators.
        """

    def observe(self, measured: ObservedIteration) -> None:
        """Records the measurements of one iteration."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to store with snapshots, as JSON-compatible values."""
        ...
