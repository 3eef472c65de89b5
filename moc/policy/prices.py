"""What a policy tells the simulator and ``--ckpt-policy auto`` of itself: settings to choose from, and their prices.

A price is in bytes; what bytes cost in seconds, and what a fault takes back, is reckoned alike for all policies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moc.policy.window import OperatorBytes

Settings = Mapping[str, Any]
"""Settings of a policy by name: those of its flags, without the policy's own name, such as ``k`` for ``pec_k``."""


@dataclass(frozen=True)
class Sizes:
    """What one snapshot holds.

    Attributes:
        busiest: bytes of the rank that saves most.
        total: bytes of all ranks.
    """

    busiest: float
    total: float


@dataclass(frozen=True)
class Machine:
    """What policies are priced for: a model, spread over ranks.

    Attributes:
        ranks: of the job.
        everything: a snapshot of everything.
        with_experts: a snapshot of all that is not an expert and so many experts of each layer, one of ``ks``.
        stages: by pipeline stage its operators, in the order in which sparse snapshots save them.
        hidden_s: seconds of an iteration beside which a copy costs nothing.
        rate: bytes per second of such a copy.
        ks: numbers of experts that are worth looking at, ascending; the last is all of them; empty without experts.
    """

    ranks: int
    everything: Sizes
    with_experts: Callable[[int], Sizes] = field(hash=False)
    stages: Sequence[Sequence[OperatorBytes]]
    hidden_s: float
    rate: float
    ks: Sequence[int] = ()

    @property
    def num_experts(self) -> int:
        """Of a layer; 0 without experts."""
        return max(self.ks, default=0)


@dataclass(frozen=True)
class Price:
    """What one checkpoint of a policy is made of: what a run can go on from.

    Attributes:
        size: of all of its snapshots together.
        snapshots: bytes of the busiest rank, by snapshot; several are a window, one after each iteration.
        k: experts of each layer that a checkpoint has as new, the others being older; None where it has all.
        length: of the window, if that of another stage is longer.
    """

    size: Sizes
    snapshots: Sequence[float] = ()
    k: int | None = None
    length: int = 1
