"""Models policies in simulation: the cost of a save, the loss by a failure, the cost of recovery, and the usable nodes.

Recovery is the papers', or this program's with its recovery planner and measured times (:class:`ProgramSaving`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from moc.policy.costs import Price
from moc.policy.pec_selection import DynamicK, mean_age
from moc.policy.windows import generate_schedule
from moc.recovery.copy_placement import Placement, survival
from moc.recovery.plan import JobInventory, plans
from moc.recovery.sources import STORAGE, AvailableCheckpoint
from moc.simulate import SimulationError
from moc.simulate.cost import Work
from moc.state.operators import Detail, Operator

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
        remaining: nodes that continue training; 0 to wait for more.
    """

    nodes: int
    of: int
    before: int = 0
    remaining: int = 0

    @property
    def total(self) -> int:
        """Nodes that count as lost together."""
        return min(self.of, self.nodes + self.before)


@dataclass(frozen=True)
class SimulatedCosts:
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
    beyond: SimulatedCosts | None = None
    changed: SimulatedCosts | None = None
    members: VaryingNodes | None = None
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

    def recovery_costs(self, loss: Loss, chance: float) -> SimulatedCosts:
        """Returns the costs of recovery from a loss.

        ``chance`` is a random number from 0 to 1, which decides whether copies remain; the same for losses that add up.
        """
        if self.changed is not None and loss.remaining not in (0, loss.of):
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
    """Caches :func:`moc.recovery.copy_placement.survival`, which is slow for thousands of nodes."""
    return survival(copies, nodes) if nodes <= sum(map(len, copies.groups)) else 0.0


def at_risk(price: Price, num_experts: int) -> float:
    """Returns tokens at risk, in iterations, with a checkpoint in each: by the policy, or for experts in turn."""
    if price.k is None or price.k >= num_experts:
        return 0.0
    return mean_age(num_experts, price.k) if price.tokens_at_risk is None else price.tokens_at_risk


class Strategy:
    """Policy during a run; constant, unless a failure changes it."""

    plt = 0.0
    k: int | None = None

    def __init__(self, saving: SimulatedCosts):
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

    def __init__(self, by_k: Mapping[int, SimulatedCosts], dynamic: DynamicK, total: int, *, fixed: bool):
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


_SLACK = 1e-9  # of an iteration, for floating-point rounding


_SURVIVOR, _LOST = 0, 1


@dataclass(frozen=True)
class RecoveryCosts:
    """Parts of a recovery in seconds, as measured in a run (:mod:`moc.simulate.profile`).

    Attributes:
        detect_s: from the loss until the survivors have stopped.
        regroup_s: from then until a new worker is built, all are connected, and the remaining state is known.
        transfer_s: loading, and copying from others, without replay.
        warm_up_s: excess of the first iteration over others.
        frozen_s: a replayed iteration with frozen operators; None if none was observed.
        alone_s: an iteration that only the lost stages replay, without frozen operators, while others wait with their
            state; None if none was observed.
        more_s: added by each further worker lost together, since replacements share the build resources.

    Raises:
        ValueError: a value is negative or not finite.
    """

    detect_s: float
    regroup_s: float
    transfer_s: float
    warm_up_s: float
    frozen_s: float | None = None
    alone_s: float | None = None
    more_s: float = 0.0

    def __post_init__(self):
        for name, seconds in dataclasses.asdict(self).items():
            if seconds is not None and not (math.isfinite(seconds) and seconds >= 0):
                raise SimulationError(
                    f"{name} of a recovery cannot be {seconds}. Fix: give seconds from 0",
                    code="value-out-of-range",
                )

    @property
    def restart_s(self) -> float:
        """Seconds from the loss of one worker until replay or new iterations start."""
        return self.detect_s + self.regroup_s + self.transfer_s + self.warm_up_s


@dataclass(frozen=True)
class ProgramSaving(SimulatedCosts):
    """Policy whose restored iteration the program's recovery planner chooses (:func:`moc.recovery.plan.plans`).

    One worker represents the survivors and one the lost.  Each of the W snapshots of a window starts with its own
    iteration, and becomes usable with the same delay as the last one: ``lag`` - (W - 1) iterations.

    Attributes:
        replicas: survivors hold replicas of all lost state, as data-parallel ranks without ZeRO do.
        more_s: added to ``restart_s`` by each further worker lost together.
    """

    replicas: bool = False
    more_s: float = 0.0

    @property
    def window(self) -> int:
        """W; 1 if every checkpoint is full."""
        return self.conversion + 1

    def restored(self, iterations: float) -> int:
        """Returns :meth:`PolicyCosts.restored`: the first iteration of the loaded window, or the survivors' one."""
        operators = [Operator(f"layers.{n}.mlp", "mlp", n, None, 1) for n in range(self.window)]
        replica_ids = {_SURVIVOR: "a", _LOST: "a" if self.replicas else "b"}
        replica_by_operator = {
            rank: dict.fromkeys((operator.name for operator in operators), replica)
            for rank, replica in replica_ids.items()
        }
        live = {_SURVIVOR: math.floor(iterations + _SLACK)}
        survivor_state = JobInventory(list(self._available(operators, iterations + _SLACK)), live, replica_by_operator)
        plan = next(plans(survivor_state, operators, self.exact), None)
        if plan is None:
            return 0
        return plan.path.points[0].iteration if plan.path else plan.iteration

    def recovery_costs(self, loss: Loss, chance: float) -> SimulatedCosts:
        """Returns :meth:`PolicyCosts.recovery_costs`, with ``more_s`` for each further lost worker."""
        costs = super().recovery_costs(loss, chance)
        return dataclasses.replace(costs, restart_s=costs.restart_s + self.more_s * max(0, loss.total - 1))

    def _available(self, operators: list[Operator], iterations: float) -> Iterator[AvailableCheckpoint]:
        """Yields the usable snapshots, from the newest complete window on; the initial state counts as one."""
        turns = generate_schedule([operator.name for operator in operators], 1)
        delay = self.lag - self.conversion
        for begin in range(super().restored(iterations), math.floor(iterations) + 1, self.interval):
            for at, turn in enumerate(turns, begin):
                if at + delay <= iterations or at == 0:
                    details = dict.fromkeys(turn.full, Detail.FULL) | dict.fromkeys(turn.compute, Detail.COMPUTE)
                    yield AvailableCheckpoint(at, STORAGE, {name: detail.value for name, detail in details.items()})


def program_recovery(
    saving: SimulatedCosts, parts: RecoveryCosts, iteration_s: float, lag: float, sparse: bool = False
) -> ProgramSaving:
    """Returns the same policy with this program's recovery.

    With full snapshots, survivors keep their state if the lost worker's state of the same iteration exists.  Otherwise
    all roll back to the newest snapshot.  With sparse ones, all roll back to the newest complete window and replay it.
    If the measured recoveries were local, only the lost stages replay.

    ``lag`` is iterations from a snapshot's start until it is usable; the interval of a sparse policy is its window.
    """
    window = saving.interval if sparse else 1
    local = parts.alone_s is not None
    replay_s = parts.alone_s if local else iteration_s + saving.per_iteration_s()
    own = {field.name: getattr(saving, field.name) for field in dataclasses.fields(SimulatedCosts)}
    own |= dict(lag=window - 1 + lag, restart_s=parts.restart_s, replay_s=replay_s)
    own |= dict(conversion=window - 1, conversion_s=replay_s if parts.frozen_s is None else parts.frozen_s, local=local)
    return ProgramSaving(**own, more_s=parts.more_s)


@dataclass(frozen=True)
class VaryingNodes:
    """Job that trains on any number of nodes between two limits; here n of N nodes take N / n times as long.

    Attributes:
        least: MIN; with fewer nodes the job waits.
        most: MAX, the job's nodes.
        grow_wait_s: wait for more nodes at the start, and after some arrive, unless all are present.
        grow_s: time from then until all train; nothing is replayed.

    Raises:
        ValueError: the numbers of nodes are no range.
    """

    least: int
    most: int
    grow_wait_s: float = 0.0
    grow_s: float = 0.0

    def __post_init__(self):
        if not 1 <= self.least <= self.most:
            raise SimulationError(
                f"a job of {self.most} nodes cannot continue with {self.least}. Fix: give 1 to {self.most} nodes",
                code="value-out-of-range",
            )

    def usable(self, nodes: int | None) -> int:
        """Returns how many of this many nodes (None for unlimited) train; 0 if they are too few."""
        available = self.most if nodes is None else min(nodes, self.most)
        return next((n for n in range(available, self.least - 1, -1) if n == self.most or self.fits(n)), 0)

    def fits(self, nodes: int) -> bool:
        """Returns whether the job can be divided among this many nodes."""
        return True

    def slowdown(self, nodes: int) -> float:
        """Returns the duration of an iteration on this many nodes, relative to the job's iteration."""
        return self.most / nodes


def steps(micro_batches: float, stages: int, vpp: int) -> float:
    """Returns the duration of a pipeline's iteration in micro batches: M + (S - 1) / v (:mod:`moc.simulate.cost`)."""
    return micro_batches + (stages - 1) / vpp


@dataclass(frozen=True)
class CompletePipelines(VaryingNodes):
    """Job whose pipelines get equally many micro batches of the same global batch.

    Attributes:
        work: work with the pipelines of all nodes.
        stages: stages of a pipeline.
        vpp: virtual stages of a stage.
    """

    work: Work = Work(pipelines=1)
    stages: int = 1
    vpp: int = 1

    def fits(self, nodes: int) -> bool:
        """Returns whether nodes form complete pipelines, and micro batches divide among them."""
        pipelines, remainder = divmod(self.work.pipelines * nodes, self.most)
        return not remainder and pipelines > 0 and not self.work.global_batch % (self.work.micro_batch * pipelines)

    def slowdown(self, nodes: int) -> float:
        """Returns :meth:`Members.slowdown`."""
        return self._steps(nodes) / self._steps(self.most)

    def _steps(self, nodes: int) -> float:
        pipelines = self.work.pipelines * nodes // self.most
        return steps(self.work.global_batch / self.work.micro_batch / pipelines, self.stages, self.vpp)
