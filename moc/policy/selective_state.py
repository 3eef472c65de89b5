"""State of the ``selective`` policy between snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Table = dict[int, list[int]]
"""Integers by layer and expert."""


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
    persisted: Table = field(default_factory=dict)
    persisted_at: Table = field(default_factory=dict)
    due: int = 0
    given: dict[int, int] = field(default_factory=dict)
    iteration: int = 0
    mlt: float = 0.0
    mlt_peers: float = 0.0

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of :func:`dataclasses.asdict`.

        Raises:
            ValueError: the state is of another class.
        """
        try:  # before copies had experts of their own, they were those in memory
            state = {"copied": state["saved"], "copied_at": state["saved_at"], "mlt_peers": state["mlt"], **state}
            tables = {name: {int(layer): list(map(int, row)) for layer, row in state[name].items()} for name in _TABLES}
            plain = {name: kind(state[name]) for name, kind in _PLAIN.items()}
            plain["given"] = {int(layer): int(tokens) for layer, tokens in state["given"].items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no state of selective checkpoints: {state!r}; start without it") from error
        vars(self).update(tables | plain)


_TABLES = ("saved", "saved_at", "copied", "copied_at", "persisted", "persisted_at")
_PLAIN = {"based": bool, "stored": bool, "due": int, "iteration": int, "mlt": float, "mlt_peers": float}
