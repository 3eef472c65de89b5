"""Policies as a model clock sees them: what a save costs, what a failure takes back, and how that is made good."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from moc.policy.adaptive import uniform_plt
from moc.policy.dynamic_k import DynamicK
from moc.recovery.placement import Placement, survival

NEVER = 10**12
"""Iterations between checkpoints where there are none."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of one save, over all ranks.

    Attributes:
        host: to host memory.
        network: to peers.
        storage: to disk or object storage.
    """

    host: float = 0.0
    network: float = 0.0
    storage: float = 0.0


@dataclass(frozen=True)
class PolicyCosts:
    """A policy at work.

    One checkpoint begins every ``interval`` iterations and can be restored from ``lag`` iterations later, which need
    not be whole ones.  For a sparse window both are W: its checkpoint begins with the window, and is whole with the
    window's last snapshot.

    Attributes:
        name: of the policy.
        interval: iterations from one checkpoint to the next.
        stall_s: seconds for which training waits because of each.
        lag: iterations after it began until it can be restored from.
        restart_s: from a failure until replay begins.
        replay_s: of one iteration that is replayed, with the checkpoints that are saved on the way.
        conversion_s: of one that is replayed while some operators are frozen; the first ``conversion`` ones.
        conversion: iterations of these (MoEvement, section 3.3).
        local: only the stages of what was lost replay; the others wait with their state (section 3.4).
        survives: nodes that may be lost at once, whichever they are, before copies in memory are not enough.
        copies: which nodes keep copies of which, so that of more it depends on which ones are lost; None: none do.
        beyond: how the run comes back when they are not enough; None: in the same way.
        elastic: with fewer nodes than wanted, training goes on with the largest multiple of so many; 0: it waits.
        traffic: of one checkpoint.
        host_bytes: that all ranks' checkpoints and logs keep in host memory.
        exact: after a recovery the run is what it would have been.
    """

    name: str
    interval: int = NEVER
    stall_s: float = 0.0
    lag: float = 0
    restart_s: float = 0.0
    replay_s: float = 0.0
    conversion_s: float = 0.0
    conversion: int = 0
    local: bool = False
    survives: int = 0
    copies: Placement | None = None
    beyond: PolicyCosts | None = None
    elastic: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    host_bytes: float = 0.0
    exact: bool = True

    def __post_init__(self):
        if self.interval < 1 or self.lag < 0:
            raise ValueError(f"{self.name}: an interval is at least 1 iteration and a lag at least 0")
        times = (self.stall_s, self.restart_s, self.replay_s, self.conversion_s)
        if not all(math.isfinite(t) and t >= 0 for t in times):
            raise ValueError(f"{self.name}: seconds must be numbers from 0, not {times}")

    def restored(self, iterations: float) -> int:
        """The iteration whose state comes back, and from which iterations are replayed.

        Args:
            iterations: that were completed, and how much of the next, when something was lost.
        """
        return max(0, self.interval * math.floor((iterations - self.lag) / self.interval + 1e-9))

    def way_back(self, nodes: int, chance: float) -> PolicyCosts:
        """What a recovery goes by when so many nodes are lost at once.

        Args:
            nodes: that are lost.
            chance: from 0 to 1, drawn for this loss; which nodes they are decides whether copies are left.
        """
        if self.beyond is None or nodes <= self.survives:
            return self
        return self if self.copies and chance < _survival(self.copies, nodes) else self.beyond

    def replay_total_s(self, iterations: float) -> float:
        """Seconds to replay so many iterations."""
        frozen = min(iterations, self.conversion)
        return frozen * self.conversion_s + (iterations - frozen) * self.replay_s

    def replayed(self, seconds: float) -> float:
        """Iterations that are replayed after so many seconds; the inverse of :meth:`replay_total_s`."""
        frozen_s = self.conversion * self.conversion_s
        if seconds < frozen_s:
            return seconds / self.conversion_s
        return self.conversion + ((seconds - frozen_s) / self.replay_s if self.replay_s else 0.0)

    def per_iteration_s(self) -> float:
        """Seconds that saving adds to an iteration, in the mean."""
        return self.stall_s / self.interval


@lru_cache(maxsize=64)
def _survival(copies: Placement, nodes: int) -> float:
    """See :func:`moc.recovery.placement.survival`, which takes a while for thousands of nodes."""
    return survival(copies, nodes) if nodes <= sum(map(len, copies.groups)) else 0.0


class Strategy:
    """A policy in a run: the same all the time, unless a failure changes it."""

    plt = 0.0
    k: int | None = None

    def __init__(self, saving: PolicyCosts):
        self.saving = saving

    def failed(self, iterations: int) -> None:
        """Learns of a failure when so many iterations are completed."""


class PecStrategy(Strategy):
    """K experts at a time, and more of them the more faults have cost (MoC, sections 3.2 and 5.3).

    What a fault costs is what the planner expects of one (``moc.policy.adaptive.uniform_plt``); whether K is raised
    says ``moc.policy.dynamic_k``.
    """

    def __init__(
        self, by_k: Mapping[int, PolicyCosts], dynamic: DynamicK, lost_share: float, total: int, *, fixed: bool
    ):
        """Starts a run.

        Args:
            by_k: how it saves, for every K that can come.
            dynamic: K, its limit and what it has cost.
            lost_share: share of the experts that come back from storage after a failure, not from memory.
            total: iterations of the whole training, of whose tokens PLT is a proportion.
            fixed: K stays as it is whatever faults cost.
        """
        super().__init__(by_k[dynamic.k])
        self._by_k, self._dynamic, self._fixed = by_k, dynamic, fixed
        self._lost_share, self._total = lost_share, total

    @property
    def k(self) -> int:
        """Experts of each layer in a checkpoint."""
        return self._dynamic.k

    def failed(self, iterations: int) -> None:
        """Books what the failure has lost, and raises K where that passes its share."""
        dynamic = self._dynamic
        age = uniform_plt(dynamic.num_experts, 1.0, self._lost_share, dynamic.k, dynamic.k, self.saving.interval)
        lost = min(age, iterations) / self._total
        self.plt += lost
        if not self._fixed:
            self._dynamic = dynamic.recovered(lost)
            self.saving = self._by_k[self.k]
