"""How much of an operator is saved; here alone, so that plans can be made without torch."""

from __future__ import annotations

from enum import Enum


class Detail(Enum):
    """How much of an operator."""

    FULL = "full"
    """Master weights and moments (fp32, or as their flags have it; with ZeRO-1 the slices of this rank), from which the
    weights follow; and the biases of routers, which no optimizer owns, as slot ``param`` (fp32; with ZeRO-1 those of
    the first data-parallel rank stand for all)."""

    MASTER = "master"
    """The master weights of ``FULL`` and the biases of routers, without moments."""

    MOMENTS = "moments"
    """The moments of ``FULL`` alone: ``MASTER`` and ``MOMENTS`` together are ``FULL``, and nothing is in both."""

    COMPUTE = "compute"
    """Slot ``param``: the weights that the model computes with (in its dtype; with ZeRO-1 those of which this rank has
    the masters, though every data-parallel rank computes with all), and the biases of routers."""

    GRAD = "grad"
    """Slot ``grad``: the reduced gradients (in the dtype of their reduction; with ZeRO-1 the slices of this rank,
    outside of which megatron-core leaves what is not reduced), still multiplied by fp16's loss scale."""

    def holds(self, slot: str) -> bool:
        """Whether a slot of an operator's parameters, or of a router's biases, is part of it."""
        if self is Detail.FULL:
            return slot != "grad"
        if self is Detail.MOMENTS:
            return slot not in ("master", "param", "grad")
        return slot in {Detail.MASTER: ("master", "param"), Detail.COMPUTE: ("param",), Detail.GRAD: ("grad",)}[self]
