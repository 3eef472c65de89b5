"""State of the ``pec`` policy between snapshots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moc.files.decode import Amount, Count
from moc.policy.partial import PartialState, Table


@dataclass
class PecState(PartialState):
    """Progress of the rotation; changed only by what the policy is told.

    Attributes:
        partial: partial snapshots so far.
        persists: snapshots persisted so far.
        persisted: number of the persisted snapshot that last held the expert, by layer and expert.
        saved: tokens given to the expert when it was last saved, by layer and expert.
        k: K_persist as raised by faults; 0 if unchanged.
        booked: PLT booked on ``k``; see :class:`moc.policy.dynamic_k.DynamicK`.
    """

    partial: Count = 0
    persists: Count = 0
    persisted: Table = field(default_factory=dict)
    saved: Table = field(default_factory=dict)
    k: Count = 0
    booked: Amount = 0.0

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
