"""Defines candidate settings of policies and their prices, for the simulator and ``--ckpt-policy auto``.

Prices are in bytes. The seconds to move these bytes, and the work lost to a fault, are computed identically for all
policies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moc.policy.window import OperatorBytes

Settings = Mapping[str, Any]
"""Settings of a policy by flag name without the policy's prefix, such as ``k`` for ``pec_k``."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of one snapshot: of the busiest rank, and of all ranks."""

    busiest: float
    total: float


@dataclass(frozen=True)
class Machine:
    """A model partitioned over ranks, and the copy speed, for which policies are priced.

    Attributes:
        ranks: ranks of the job.
        everything: sizes of a full snapshot.
        with_experts: sizes of a snapshot of everything dense and K experts of each layer, for any K from 1 to all.
        stages: operators by pipeline stage, in the order in which sparse snapshots save them.
        hidden_s: seconds of an iteration that a copy can overlap at no cost.
        rate: bytes per second of an overlapped copy.
        ks: candidate values of K, ascending, the last being all experts; empty without experts.
        at_risk: tokens at risk right after a snapshot, in iterations, if experts are selected by popularity. Its
            arguments are the share of experts in the snapshot and the cost of an expert in every snapshot
            (:func:`moc.policy.risk.by_share`). None if tokens were not counted.
        gradient: bytes of an expert's gradients relative to its state. None if no snapshot may have gradients, or a
            loss would leave only storage, which has none.
    """

    ranks: int
    everything: Sizes
    with_experts: Callable[[int], Sizes] = field(hash=False)
    stages: Sequence[Sequence[OperatorBytes]]
    hidden_s: float
    rate: float
    ks: Sequence[int] = ()
    at_risk: Callable[[float, float], float] | None = field(default=None, hash=False)
    gradient: float | None = None

    @property
    def num_experts(self) -> int:
        """Experts of a layer; 0 without experts."""
        return max(self.ks, default=0)


@dataclass(frozen=True)
class Price:
    """Contents and price of one checkpoint of a policy, from which a run can resume.

    Attributes:
        size: total size of its snapshots.
        snapshots: bytes of the busiest rank by snapshot; several form a window, one per iteration.
        k: experts of each layer that a checkpoint saves, the others being older; None for all.
        length: snapshots in the longest window of any stage.
        kept: maximum number of snapshots that recovery needs in memory, if the policy has windows; None otherwise.
        at_risk: tokens at risk right after it, in iterations, with one per iteration; None as if experts were saved in
            turn.
        every: iterations between snapshots that this price is for; None for any.
        waits: bytes of the busiest rank that are copied while training waits, and do not hide.
        folded: updates of all experts that a recovery repeats with saved gradients.
        chained: maximum bytes of gradients in memory in addition to the newest states, of all ranks.
    """

    size: Sizes
    snapshots: Sequence[float] = ()
    k: int | None = None
    length: int = 1
    kept: int | None = None
    at_risk: float | None = None
    every: int | None = None
    waits: float = 0.0
    folded: float = 0.0
    chained: float = 0.0
