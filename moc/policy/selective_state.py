"""State of the ``selective`` policy between snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Table = dict[int, list[int]]
"""Integers by layer and expert."""


class Saves(NamedTuple):
    """When each expert was last saved to a tier, by layer: in tokens given to it, in iterations, and in full."""

    tokens: Table
    at: Table
    bases: Table


@dataclass
class SelectiveState:
    """What the policy was told.

    Attributes:
        based: memory, or the only tier, holds every expert.
        stored: storage holds every expert.
        saved: tokens given to each expert when it was last saved, by layer.
        saved_at: iteration at which it was last saved.
        copied: as ``saved``, for copies in the memory of other nodes.
        copied_at: as ``saved_at``, for copies.
        bases: iteration at which it was last saved in full, by layer; empty if gradients are not saved.
        copied_bases: as ``bases``, for copies.
        persisted: as ``saved``, for storage beside a memory tier.
        persisted_at: as ``saved_at``, for storage beside a memory tier.
        due: iteration at which the next snapshot goes to storage beside a memory tier.
        given: tokens given to the experts of each layer until the newest snapshot.
        iteration: of the newest snapshot.
        mlt: momentary lost tokens right after it, in iterations: see :meth:`Selective.gauges`.
        mlt_peers: the same if a node is lost, and its experts come from copies.
    """

    based: bool = False
    stored: bool = False
    saved: Table = field(default_factory=dict)
    saved_at: Table = field(default_factory=dict)
    copied: Table = field(default_factory=dict)
    copied_at: Table = field(default_factory=dict)
    bases: Table = field(default_factory=dict)
    copied_bases: Table = field(default_factory=dict)
    persisted: Table = field(default_factory=dict)
    persisted_at: Table = field(default_factory=dict)
    due: int = 0
    given: dict[int, int] = field(default_factory=dict)
    iteration: int = 0
    mlt: float = 0.0
    mlt_peers: float = 0.0

    @property
    def in_memory(self) -> Saves:
        """What was saved to memory, or to the only tier."""
        return Saves(self.saved, self.saved_at, self.bases)

    @property
    def in_peers(self) -> Saves:
        """What other nodes have copies of."""
        return Saves(self.copied, self.copied_at, self.copied_bases)

    @property
    def in_storage(self) -> Saves:
        """What was saved to storage beside a memory tier."""
        return Saves(self.persisted, self.persisted_at, {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of :func:`dataclasses.asdict`.

        Raises:
            ValueError: the state is of another class.
        """
        try:
            state = _of_before(state)
            tables = {name: {int(layer): list(map(int, row)) for layer, row in state[name].items()} for name in _TABLES}
            plain = {name: kind(state[name]) for name, kind in _PLAIN.items()}
            plain["given"] = {int(layer): int(tokens) for layer, tokens in state["given"].items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no state of selective checkpoints: {state!r}; start without it") from error
        vars(self).update(tables | plain)


_TABLES = ("saved", "saved_at", "copied", "copied_at", "bases", "copied_bases", "persisted", "persisted_at")
_PLAIN = {"based": bool, "stored": bool, "due": int, "iteration": int, "mlt": float, "mlt_peers": float}


def _of_before(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state with what it lacks if it was saved before copies had experts, or chains, of their own."""
    saves = {"copied": state["saved"], "copied_at": state["saved_at"], "mlt_peers": state["mlt"]}
    return {"bases": {}, "copied_bases": state.get("bases", {}), **saves, **state}
