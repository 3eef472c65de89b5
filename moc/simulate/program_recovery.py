"""How our program comes back, where the policies' own ways are the papers': by its plan function, in measured times."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from moc.policy.window import generate_schedule
from moc.recovery.plan import JobInventory, plans
from moc.recovery.sources import STORAGE, AvailableCheckpoint
from moc.simulate.policy_costs import PolicyCosts
from moc.state.detail import Detail
from moc.state.operators import Operator

_SLACK = 1e-9  # of an iteration, for sums of floating point
_SURVIVOR, _LOST = 0, 1


@dataclass(frozen=True)
class RecoveryCosts:
    """What a recovery is made of, in seconds, as a run has measured it (:mod:`moc.simulate.profile`).

    Attributes:
        detect_s: from the loss until those that are left have stopped.
        regroup_s: from then until a new worker is built, all are connected, and it is known what is left.
        transfer_s: loading, and copying from others; what is computed again is not in it.
        warm_up_s: by which the first iteration is longer than others.
        frozen_s: of an iteration that is computed again while some operators are frozen; None where that was not seen.
        alone_s: of one that the stages of what was lost compute again by themselves, with nothing frozen, while others
            wait with their state; None where no stage did so.
        more_s: that each further worker adds which is lost at once, since new ones share what they are built on.

    Raises:
        ValueError: one is negative, or no number.
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
                raise ValueError(f"{name} of a recovery cannot be {seconds}: give seconds from 0")

    @property
    def restart_s(self) -> float:
        """From the loss of one worker until iterations are computed again, or new ones."""
        return self.detect_s + self.regroup_s + self.transfer_s + self.warm_up_s


@dataclass(frozen=True)
class ProgramSaving(PolicyCosts):
    """A policy of which :func:`moc.recovery.plan.plans` says where the program goes on.

    One worker stands for those that are left and one for those that are lost.  A snapshot of W in a window begins with
    the iteration of its place, and each can be used as much later as the last one can, ``lag`` - (W - 1) iterations.

    Attributes:
        replicas: those that are left hold alike all that was lost, as data-parallel ranks without ZeRO do.
        alone_s: of one that the stages of what was lost compute again by themselves, with nothing frozen, while others
            wait with their state; None where no stage did so.
        more_s: that each further one adds to ``restart_s`` that is lost at once.
    """

    replicas: bool = False
    more_s: float = 0.0

    @property
    def window(self) -> int:
        """W; 1 where every checkpoint is of everything."""
        return self.conversion + 1

    def restored(self, iterations: float) -> int:
        """As :meth:`PolicyCosts.restored`: where the window begins that is loaded, or what those that are left keep."""
        operators = [Operator(f"layers.{n}.mlp", "mlp", n, None, 1) for n in range(self.window)]
        alike = {_SURVIVOR: "a", _LOST: "a" if self.replicas else "b"}
        pieces = {rank: dict.fromkeys((one.name for one in operators), piece) for rank, piece in alike.items()}
        live = {_SURVIVOR: math.floor(iterations + _SLACK)}
        left = JobInventory(list(self._held(operators, iterations + _SLACK)), live, pieces)
        plan = next(plans(left, operators, self.exact), None)
        if plan is None:
            return 0
        return plan.way.moments[0].iteration if plan.way else plan.iteration

    def way_back(self, nodes: int, chance: float) -> PolicyCosts:
        """As :meth:`PolicyCosts.way_back`."""
        way = super().way_back(nodes, chance)
        return dataclasses.replace(way, restart_s=way.restart_s + self.more_s * (nodes - 1))

    def _held(self, operators: list[Operator], iterations: float) -> Iterator[AvailableCheckpoint]:
        """The snapshots that can be used, from the newest window on that is whole; the state at the start is one."""
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
    """The same policy, as the program comes back.

    With full snapshots those that are left keep their state where the lost worker's is there of the same iteration;
    else all go back to the newest snapshot.  With sparse ones all go back to the newest window that is whole, and
    compute it again.  Where the measured recoveries were those of single stages, the stages of what was lost do that.

    Args:
        saving: a policy; of a sparse one the interval is its window.
        parts: of a recovery.
        iteration_s: seconds of an iteration without checkpoints.
        lag: iterations after it began until one snapshot can be used.
        sparse: whether operators take turns.
    """
    window = saving.interval if sparse else 1
    local = parts.alone_s is not None
    replay_s = parts.alone_s if local else iteration_s + saving.per_iteration_s()
    own = {field.name: getattr(saving, field.name) for field in dataclasses.fields(PolicyCosts)}
    own |= dict(lag=window - 1 + lag, restart_s=parts.restart_s, replay_s=replay_s)
    own |= dict(conversion=window - 1, conversion_s=replay_s if parts.frozen_s is None else parts.frozen_s, local=local)
    return ProgramSaving(**own, more_s=parts.more_s)
