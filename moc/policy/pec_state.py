"""State of the ``pec`` policy between snapshots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Counts = dict[int, list[int]]
"""Counts by layer and expert."""


@dataclass
class PecState:
    """Progress of the rotation; changed only by what the policy is told.

    Attributes:
        based: memory, or the only tier, holds every expert.
        stored: storage holds every expert.
        partial: partial snapshots so far.
        persists: snapshots persisted so far.
        persisted: number of the persisted snapshot that last held the expert, by layer and expert.
        saved: tokens given to the expert when it was last saved, by layer and expert.
        k: K_persist as raised by faults; 0 if unchanged.
        booked: PLT booked on ``k``; see :class:`moc.policy.dynamic_k.DynamicK`.
    """

    based: bool = False
    stored: bool = False
    partial: int = 0
    persists: int = 0
    persisted: Counts = field(default_factory=dict)
    saved: Counts = field(default_factory=dict)
    k: int = 0
    booked: float = 0.0

    def note_saved(self, experts: Mapping[int, Sequence[int]], load: Mapping[int, Sequence[int]]) -> None:
        """Records the experts of a snapshot, and the tokens that they have been given."""
        for layer, numbers in experts.items():
            row = self.saved.setdefault(layer, [0] * len(load[layer]))
            for expert in numbers:
                row[expert] = load[layer][expert]

    def note_persisted(self, experts: Mapping[int, Sequence[int]]) -> None:
        """Records the experts of the next persisted snapshot."""
        self.persists += 1
        for layer, numbers in experts.items():
            for expert in numbers:
                self.persisted[layer][expert] = self.persists

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON-compatible values."""
        tables = {name: {str(layer): list(row) for layer, row in getattr(self, name).items()} for name in _TABLES}
        return asdict(self) | tables

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a :meth:`state_dict`.

        Raises:
            ValueError: the state does not come from :meth:`state_dict`.
        """
        try:
            tables = {name: {int(k): [int(n) for n in row] for k, row in state[name].items()} for name in _TABLES}
            plain = {name: kind(state[name]) for name, kind in _PLAIN.items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no state of partial checkpoints: {state!r}; start without it") from error
        vars(self).update(plain | tables)


_TABLES = ("persisted", "saved")
_PLAIN = {"based": bool, "stored": bool, "partial": int, "persists": int, "k": int, "booked": float}
