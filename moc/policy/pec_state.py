"""What a policy of partial checkpoints remembers from one snapshot to the next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Counts = dict[int, list[int]]
"""By layer and expert."""


@dataclass
class PecState:
    """Whose turn it is; changed only by what the policy is told.

    Attributes:
        based: memory, or the only tier that there is, holds every expert.
        stored: so does storage.
        partial: partial snapshots so far.
        persists: snapshots that went to storage so far.
        persisted: by layer and expert, which of these it was in last.
        saved: by layer and expert, the tokens that it had been given when it was saved last.
        k: experts to persist, if faults have changed it.
        booked: what faults have cost with it; see :class:`moc.policy.dynamic_k.DynamicK`.
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
        """These experts are in a snapshot, after so many tokens."""
        for layer, numbers in experts.items():
            row = self.saved.setdefault(layer, [0] * len(load[layer]))
            for expert in numbers:
                row[expert] = load[layer][expert]

    def note_persisted(self, experts: Mapping[int, Sequence[int]]) -> None:
        """These experts go to storage with the next of the snapshots that do."""
        self.persists += 1
        for layer, numbers in experts.items():
            for expert in numbers:
                self.persisted[layer][expert] = self.persists

    def state_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        tables = {name: {str(layer): list(row) for layer, row in getattr(self, name).items()} for name in _TABLES}
        return asdict(self) | tables

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from :meth:`state_dict`.

        Raises:
            ValueError: this is no such state.
        """
        try:
            tables = {name: {int(k): [int(n) for n in row] for k, row in state[name].items()} for name in _TABLES}
            plain = {name: kind(state[name]) for name, kind in _PLAIN.items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no state of partial checkpoints: {state!r}; start without it") from error
        vars(self).update(plain | tables)


_TABLES = ("persisted", "saved")
_PLAIN = {"based": bool, "stored": bool, "partial": int, "persists": int, "k": int, "booked": float}


def turn(partial: int, period: int, persist_every: int) -> int:
    """The number in the rotation of a partial snapshot.

    If every ``persist_every``-th snapshot goes to storage, and that has a divisor in common with the period of the
    rotation, storage would get the same experts for ever.  So each time after it has seen all that it would see, the
    rotation stands still for one snapshot, and from then on storage sees the next ones.

    Args:
        partial: partial snapshots before this one.
        period: after how many of them the same experts are saved again.
        persist_every: snapshots from one that goes to storage to the next.
    """
    together = math.lcm(period, persist_every)
    return partial - partial // together if together < period * persist_every else partial
