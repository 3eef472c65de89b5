"""State subsets: which part of an operator is saved; a separate module, so that plans do not need torch."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import msgspec


class Detail(Enum):
    """Subset of an operator's state that is saved."""

    FULL = "full"
    """Master weights and moments (fp32 or as set by flags; with ZeRO-1 the slices of this rank), from which the compute
    weights follow; and router biases, which no optimizer owns, as slot ``param`` (fp32; with ZeRO-1
    the first data-parallel rank's copy stands for all)."""

    MASTER = "master"
    """The master weights of ``FULL`` and the router biases, without moments."""

    MOMENTS = "moments"
    """The moments of ``FULL``: ``MASTER`` and ``MOMENTS`` are disjoint and together make ``FULL``."""

    COMPUTE = "compute"
    """Slot ``param``: the weights that the model computes with, in its dtype, and the router biases.  With ZeRO-1, only
    the weights whose masters this rank owns, although every data-parallel rank holds all weights."""

    GRAD = "grad"
    """Slot ``grad``: the reduced gradients, in the dtype of their reduction, still multiplied by fp16's loss scale.
    With ZeRO-1, only the slices of this rank: megatron-core leaves the other gradients unreduced."""

    def holds(self, slot: str) -> bool:
        """Returns whether this subset includes a slot of an operator's parameters or of a router's biases."""
        if self is Detail.FULL:
            return slot != "grad"
        if self is Detail.MOMENTS:
            return slot not in ("master", "param", "grad")
        return slot in {Detail.MASTER: ("master", "param"), Detail.COMPUTE: ("param",), Detail.GRAD: ("grad",)}[self]


DetailName = Annotated[str, msgspec.Meta(pattern=rf"^({'|'.join(one.value for one in Detail)})\Z")]
"""The value of a :class:`Detail`."""
