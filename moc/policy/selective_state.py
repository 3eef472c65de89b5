"""Defines the state of the ``selective`` policy between snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from moc.files import decode
from moc.files.decode import Amount, Count
from moc.policy.partial import PartialState, Saves, Table
from moc.policy.plan import Load
from moc.policy.risk import lost_by_layer


@dataclass
class SelectiveState(PartialState):
    """Saves to memory, copies and storage, and the risk of the newest snapshot.

    Attributes:
        copied: as ``saved``, for copies in the memory of other nodes.
        copied_at: as ``saved_at``, for copies.
        bases: iteration of each expert's last full save since the run was last resumed.
        copied_bases: as ``bases``, for copies.
        given: tokens given to the experts of each layer until the newest snapshot.
        iteration: iteration of the newest snapshot.
        mlt: momentary lost tokens right after it, in iterations: see :meth:`Selective.gauges`.
        mlt_peers: momentary lost tokens if a node is lost, and its experts are loaded from copies.
    """

    of: ClassVar[str] = "selective checkpoints"

    copied: Table = field(default_factory=dict)
    copied_at: Table = field(default_factory=dict)
    bases: Table = field(default_factory=dict)
    copied_bases: Table = field(default_factory=dict)
    given: dict[Count, Count] = field(default_factory=dict)
    iteration: Count = 0
    mlt: Amount = 0.0
    mlt_peers: Amount = 0.0

    @property
    def in_memory(self) -> Saves:
        """Saves to memory, or to the only tier."""
        return Saves(self.saved, self.saved_at, self.bases)

    @property
    def in_peers(self) -> Saves:
        """Copies in other nodes' memory."""
        return Saves(self.copied, self.copied_at, self.copied_bases)

    def resumed(self, in_memory: bool, in_storage: bool) -> None:
        """As :meth:`PartialState.resumed`; chains of gradients end."""
        super().resumed(in_memory, in_storage)
        self.bases.clear()
        self.copied_bases.clear()

    def note_risk(self, iteration: int, load: Load) -> None:
        """Records the tokens that a fault right after this snapshot would lose."""
        given = {layer: sum(row) for layer, row in load.items()}
        each = {
            layer: (given[layer] - self.given.get(layer, 0)) / max(1, iteration - self.iteration) for layer in given
        }
        risks = [lost_by_layer(minus(load, saves.tokens), each) for saves in (self.in_memory, self.in_peers)]
        self.given, self.iteration = given, iteration
        self.mlt, self.mlt_peers = (sum(risk) / max(1, len(risk)) for risk in risks)

    def share(self, saves: Saves, chained: bool = False) -> float:
        """Returns the mean number of experts of each layer in the newest snapshot; 0 without one.

        With ``chained``, only experts saved by their gradients count.
        """
        newest, layers = max(map(max, self.saved_at.values()), default=0), saves.at
        if not newest:
            return 0.0
        found = sum(
            at == newest and not (chained and base == at)
            for layer, row in layers.items()
            for at, base in zip(row, saves.bases.get(layer, row), strict=True)
        )
        return found / len(layers)

    @classmethod
    def read(cls, state: Mapping[str, Any], num_experts: Mapping[int, int]) -> Self:
        """As :meth:`PartialState.read`; states of earlier versions have the same experts in copies and memory."""
        known = decode.state(state, dict, cls.of)
        same = {"copied": "saved", "copied_at": "saved_at", "mlt_peers": "mlt"}
        earlier = {name: known[other] for name, other in same.items() if other in known}
        return super().read({"bases": {}, "copied_bases": known.get("bases", {}), **earlier, **known}, num_experts)


def minus(now: Load, before: Load) -> Table:
    """Returns the tokens of each expert since an earlier count, for the layers of ``before``."""
    return {layer: [n - b for n, b in zip(now[layer], before[layer], strict=True)] for layer in before}
