"""Models policies in simulation: the cost of a save, the loss by a failure, and the cost of recovery."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from moc.policy.costs import Price
from moc.policy.pec_selection import DynamicK
from moc.policy.pec_tuner import uniform_plt
from moc.recovery.placement import Placement, survival
from moc.simulate.errors import SimulationError
from moc.simulate.members import Members

NEVER = 10**12
"""Interval of a policy without checkpoints."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of one save, over all ranks: to host memory, over the network to peers, to disk or object storage."""

    host: float = 0.0
    network: float = 0.0
    storage: float = 0.0

    def after(self, saves: float, each: Traffic) -> Traffic:
        """Returns the sum with this many saves; written out, since simulations call it at each of their events."""
        return Traffic(
            self.host + saves * each.host, self.network + saves * each.network, self.storage + saves * each.storage
        )


@dataclass(frozen=True)
class Loss:
    """Loss of nodes.

    Attributes:
        nodes: nodes of the job that are lost now.
        of: training nodes when all of them last had their state.
        before: nodes of these lost since; their state is not on other nodes yet.
        left: nodes that continue training; 0 to wait for more.
    """

    nodes: int
    of: int
    before: int = 0
    left: int = 0

    @property
    def total(self) -> int:
        """Nodes that count as lost together."""
        return min(self.of, self.nodes + self.before)


@dataclass(frozen=True)
class PolicyCosts:
    """Costs of a policy.

    A checkpoint starts every ``interval`` iterations and is usable ``lag`` iterations later, which may be fractional.
    For a sparse window both are W: its checkpoint starts with the window, and is complete with the window's last
    snapshot.

    Attributes:
        interval: iterations between checkpoints.
        stall_s: seconds that training waits per checkpoint.
        lag: iterations from a checkpoint's start until it is usable.
        restart_s: seconds from a failure until replay starts.
        replay_s: seconds of a replayed iteration, with the checkpoints saved during replay.
        conversion_s: seconds of a replayed iteration with frozen operators; the first ``conversion`` ones.
        conversion: number of these (MoEvement, section 3.3).
        local: only the lost stages replay; the others wait with their state (section 3.4).
        survives: simultaneous losses of any nodes that copies in memory survive.
        copies: placement of copies, which decides whether more losses are survived; None without copies.
        beyond: costs of recovery if copies are lost; None if they are the same.
        changed: costs of recovery on another number of nodes; None if they are the same.
        members: numbers of nodes that can train; None to wait for all of the job's.
        why: reason why a recovery is not the policy's usual one.
        traffic: traffic of one checkpoint.
        host_bytes: bytes of all ranks' checkpoints and logs in host memory.
        exact: after a recovery the run is bit-identical to the run without the failure.
        at_risk: tokens that a failure loses, in iterations, for each iteration of the interval.
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
    changed: PolicyCosts | None = None
    members: Members | None = None
    why: str = ""
    traffic: Traffic = field(default_factory=Traffic)
    host_bytes: float = 0.0
    exact: bool = True
    at_risk: float = 0.0

    def __post_init__(self):
        if self.interval < 1 or self.lag < 0:
            raise SimulationError(
                f"{self.name}: an interval is less than 1 iteration, or a lag less than 0. Fix: give an interval from "
                "1 and a lag from 0",
                code="value-out-of-range",
            )
        times = (self.stall_s, self.restart_s, self.replay_s, self.conversion_s)
        if not all(math.isfinite(t) and t >= 0 for t in times):
            raise SimulationError(
                f"{self.name}: seconds cannot be {times}. Fix: give numbers from 0",
                code="value-out-of-range",
            )

    def restored(self, iterations: float) -> int:
        """Returns the iteration restored after a failure; ``iterations`` includes the fraction of the current one."""
        return max(0, self.interval * math.floor((iterations - self.lag) / self.interval + 1e-9))

    def way_back(self, loss: Loss, chance: float) -> PolicyCosts:
        """Returns the costs of recovery from a loss.

        ``chance`` is a random number from 0 to 1, which decides whether copies remain; the same for losses that add up.
        """
        if self.changed is not None and loss.left not in (0, loss.of):
            return self.changed
        if self.beyond is None or loss.total <= self.survives:
            return self
        return self if self.copies and chance < _survival(self.copies, loss.total) else self.beyond

    def replay_total_s(self, iterations: float) -> float:
        """Returns the seconds to replay this many iterations."""
        frozen = min(iterations, self.conversion)
        return frozen * self.conversion_s + (iterations - frozen) * self.replay_s

    def replayed(self, seconds: float) -> float:
        """Returns the iterations replayed in this many seconds; the inverse of :meth:`replay_total_s`."""
        frozen_s = self.conversion * self.conversion_s
        if seconds < frozen_s:
            return seconds / self.conversion_s
        return self.conversion + ((seconds - frozen_s) / self.replay_s if self.replay_s else 0.0)

    def per_iteration_s(self) -> float:
        """Returns the mean seconds that saving adds to an iteration."""
        return self.stall_s / self.interval


@lru_cache(maxsize=64)
def _survival(copies: Placement, nodes: int) -> float:
    """Caches :func:`moc.recovery.placement.survival`, which is slow for thousands of nodes."""
    return survival(copies, nodes) if nodes <= sum(map(len, copies.groups)) else 0.0


def at_risk(price: Price, num_experts: int) -> float:
    """Returns tokens at risk, in iterations, with a checkpoint in each: by the policy, or for experts in turn."""
    if price.k is None or price.k >= num_experts:
        return 0.0
    return (
        uniform_plt(num_experts, 1.0, 0.0, price.k, price.k, 1)
        if price.tokens_at_risk is None
        else price.tokens_at_risk
    )


class Strategy:
    """Policy during a run; constant, unless a failure changes it."""

    plt = 0.0
    k: int | None = None

    def __init__(self, saving: PolicyCosts):
        self.saving = saving

    def failed(self, iterations: int) -> None:
        """Registers a failure after this many completed iterations."""


class PecStrategy(Strategy):
    """Policy of K experts at a time; K is raised as faults lose tokens (MoC, sections 3.2 and 5.3).

    A fault loses the expected tokens (:func:`at_risk`); ``moc.policy.pec_selection`` decides whether K is raised.

    Args:
        by_k: the costs for every K that can occur.
        dynamic: K, its limit and the tokens lost so far.
        total: iterations of the full training; PLT is a proportion of their tokens.
        fixed: never raise K.
    """

    def __init__(self, by_k: Mapping[int, PolicyCosts], dynamic: DynamicK, total: int, *, fixed: bool):
        super().__init__(by_k[dynamic.k])
        self._by_k, self._dynamic, self._total, self._fixed = by_k, dynamic, total, fixed

    @property
    def k(self) -> int:
        """Experts of each layer in a checkpoint."""
        return self._dynamic.k

    def failed(self, iterations: int) -> None:
        """Adds the tokens that the failure lost, and raises K if they exceed its share."""
        lost = min(self.saving.interval * self.saving.at_risk, iterations) / self._total
        self.plt += lost
        if not self._fixed:
            self._dynamic = self._dynamic.after_recovery(lost)
            self.saving = self._by_k[self.k]
