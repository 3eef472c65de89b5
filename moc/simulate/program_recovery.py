"""Simulates this program's recovery instead of the papers': with its recovery planner and measured times."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from moc.policy.windows import generate_schedule
from moc.recovery.plan import JobInventory, plans
from moc.recovery.sources import STORAGE, AvailableCheckpoint
from moc.simulate.errors import SimulationError
from moc.simulate.policy_costs import Loss, PolicyCosts
from moc.state.detail import Detail
from moc.state.operators import Operator

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
class ProgramSaving(PolicyCosts):
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
        alike = {_SURVIVOR: "a", _LOST: "a" if self.replicas else "b"}
        pieces = {rank: dict.fromkeys((one.name for one in operators), piece) for rank, piece in alike.items()}
        live = {_SURVIVOR: math.floor(iterations + _SLACK)}
        left = JobInventory(list(self._held(operators, iterations + _SLACK)), live, pieces)
        plan = next(plans(left, operators, self.exact), None)
        if plan is None:
            return 0
        return plan.way.moments[0].iteration if plan.way else plan.iteration

    def way_back(self, loss: Loss, chance: float) -> PolicyCosts:
        """Returns :meth:`PolicyCosts.way_back`, with ``more_s`` for each further lost worker."""
        way = super().way_back(loss, chance)
        return dataclasses.replace(way, restart_s=way.restart_s + self.more_s * max(0, loss.total - 1))

    def _held(self, operators: list[Operator], iterations: float) -> Iterator[AvailableCheckpoint]:
        """Yields the usable snapshots, from the newest complete window on; the initial state counts as one."""
        turns = generate_schedule([operator.name for operator in operators], 1)
        delay = self.lag - self.conversion
        for begin in range(super().restored(iterations), math.floor(iterations) + 1, self.interval):
            for at, turn in enumerate(turns, begin):
                if at + delay <= iterations or at == 0:
                    details = dict.fromkeys(turn.full, Detail.FULL) | dict.fromkeys(turn.compute, Detail.COMPUTE)
                    yield AvailableCheckpoint(at, STORAGE, {name: detail.value for name, detail in details.items()})


def program_way(
    saving: PolicyCosts, parts: RecoveryCosts, iteration_s: float, lag: float, sparse: bool = False
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
    own = {field.name: getattr(saving, field.name) for field in dataclasses.fields(PolicyCosts)}
    own |= dict(lag=window - 1 + lag, restart_s=parts.restart_s, replay_s=replay_s)
    own |= dict(conversion=window - 1, conversion_s=replay_s if parts.frozen_s is None else parts.frozen_s, local=local)
    return ProgramSaving(**own, more_s=parts.more_s)
