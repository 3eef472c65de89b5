"""Defines the state of the ``pec`` policy between snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from moc.files import decode
from moc.files.decode import Amount, Count
from moc.policy.partial import PartialState


@dataclass
class PecState(PartialState):
    """Progress of the rotation, and changes of K by faults.

    Attributes:
        partial: partial snapshots so far.
        k: K_persist as raised by faults; 0 if unchanged.
        booked: PLT booked on ``k``; see :class:`moc.policy.dynamic_k.DynamicK`.
    """

    partial: Count = 0
    k: Count = 0
    booked: Amount = 0.0

    @classmethod
    def read(cls, state: Mapping[str, Any], num_experts: Mapping[int, int]) -> Self:
        """As :meth:`PartialState.read`; states of earlier versions have marks instead of tokens, and no iterations."""
        known = decode.state(state, dict, cls.of)
        if "persists" in known:
            known = known | {"saved": {}, "persisted": {}}
        return super().read({"saved_at": {}, "persisted_at": {}, **known}, num_experts)
