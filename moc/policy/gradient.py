"""Saves some operators in full in each iteration, and the gradients of all others (gradient checkpointing)."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from moc.files import decode
from moc.files.decode import Count, StateError
from moc.policy.costs import Machine, PolicyCosts, PolicySettings, Price, SnapshotSizes
from moc.policy.errors import PolicyError
from moc.policy.flags import (
    FlagValues,
    JobShape,
    PolicyFlag,
    PolicyFlags,
    every_iteration,
    gradient_requirements,
    number_or_auto,
    unmet,
)
from moc.policy.interface import (
    Capability,
    Load,
    Policy,
    PolicyReport,
    SnapshotPlan,
    SnapshotSchedule,
    SnapshotSizer,
    StorageSchedule,
    full_plan,
)
from moc.policy.interval import Every
from moc.policy.registry import policy
from moc.policy.windows import WindowTuner, pipeline_stage
from moc.state.operators import Detail, Operator

MAX_WINDOW = 8
"""Longest window that is chosen: twice the length would save a tenth of the bytes."""

_ALWAYS = -1  # the turn of operators that every snapshot saves in full


@dataclass
class GradientState:
    """State of the policy; stored with snapshots.

    Attributes:
        window: snapshots of the current or last round, in which each operator has one turn; 0 before the first one.
        start: iteration of the round's first snapshot.
        last: iteration of the last snapshot.
        bases: iteration of the newest full save of each operator, in model order; empty before the first snapshot.
    """

    window: Count = 0
    start: Count = 0
    last: Count = 0
    bases: list[Count] = field(default_factory=list)


class GradientFlags(PolicyFlags):
    """Flags of gradient checkpoints."""

    specs = (
        PolicyFlag(
            "gradient_window",
            str,
            "auto",
            "With --ckpt-policy gradient: iterations over which the operators of the model are spread, each in full "
            "once and as gradients otherwise; auto chooses the fewest whose snapshots are copied during an iteration.",
            parse=number_or_auto,
            metavar="N|auto",
            chosen_by_auto=True,
        ),
    )
    conflicts = (every_iteration("gradient"),)
    requirements = gradient_requirements(
        "--ckpt-policy gradient",
        "choose another policy, such as full",
        applies=lambda flags: flags.ckpt_policy == "gradient",
    )

    def may_save_gradients(self, flags: FlagValues, job: JobShape) -> bool:
        requirements = gradient_requirements("--ckpt-policy gradient")
        return flags.snapshot_interval in ("auto", "1") and not any(unmet(requirements, flags, job))

    def settings(self, flags: FlagValues, job: JobShape) -> dict[str, Any]:
        return {"window": 0 if flags.gradient_window == "auto" else int(flags.gradient_window)}


class GradientCosts(PolicyCosts):
    """Every window that may hide, and its price."""

    def candidates(self, machine: Machine) -> Iterator[PolicySettings]:
        """Yields every window from 2 to the default of :meth:`price`, at least 2; none without gradients."""
        if machine.gradient_ratio is not None:
            yield from ({"window": window} for window in range(2, max(2, _overlapping_window(machine)) + 1))

    def price(self, machine: Machine, settings: PolicySettings) -> Price:
        """Returns the price of a window; by default of the chosen one, or of 1 if no gradients are saved.

        A recovery repeats half a window of updates on average.
        """
        if machine.gradient_ratio is None:
            return Price(machine.full_snapshot)
        full, part, window = (
            machine.full_snapshot,
            machine.gradient_ratio,
            settings.get("window") or _overlapping_window(machine),
        )
        share = 1 / window + part * (1 - 1 / window)
        size = SnapshotSizes(share * full.busiest, share * full.total)
        snapshots = (size.busiest,) * window
        return Price(
            size,
            snapshots,
            window_length=window,
            snapshots_in_memory=window,
            interval=1,
            repeated_updates=(window - 1) / 2,
        )


@policy(
    "gradient",
    flags=GradientFlags(),
    costs=GradientCosts(),
    requires=[Capability.WINDOWS, Capability.GRADIENTS],
)
@dataclass(frozen=True)
class Gradient(Policy):
    """Saves a chain for each operator: a base, and the reduced gradients of all later iterations.

    An update is elementwise. With the reduced gradients of all workers and the step record, it repeats bit-identically,
    without data, activations or other workers. The first snapshot of a run is full. After it, one of W iterations saves
    an operator in full, and the others save its gradients, a third of the bytes. A replacement worker loads bases and
    repeats at most W - 1 updates, while all others keep their state. MoEtion (section 5.2) saves only experts'
    gradients.

    Routers are always saved in full: their biases do not follow from gradients, and they are small.

    Window and turns change only between rounds.

    Attributes:
        window: W; 0 to choose it from measurements.
        ep: expert-parallel ranks.
        stages: pipeline stage of each layer; empty for a single stage.
        state: state of the policy; stored with snapshots.
        sizes: bytes of the busiest rank for everything in full, and for all gradients; empty until known.

    Raises:
        ValueError: a setting is invalid.
    """

    window: int = 0
    ep: int = 1
    stages: tuple[int, ...] = ()
    state: GradientState = field(default_factory=GradientState, compare=False)
    sizes: list[float] = field(default_factory=list, compare=False)

    def __post_init__(self):
        if self.window < 0:
            raise PolicyError(
                f"a window of {self.window} iterations is not possible. Fix: set a window of 1 or more iterations",
                code="value-out-of-range",
            )
        object.__setattr__(self, "interval", Every(1) if self.window else WindowTuner())

    def on_sizes(self, busiest: SnapshotSizer) -> None:
        """As :meth:`Policy.on_sizes`: the busiest rank's bytes of everything and of all gradients."""
        if not self.window:
            names = [operator.name for operator in self.operators]
            self.sizes[:] = [busiest(dict.fromkeys(names, detail)) for detail in (Detail.FULL, Detail.GRAD)]

    def plan(self, iteration: int, load: Load | None = None) -> SnapshotPlan | None:
        """Returns the operators with a turn, and the routers, in full, with the gradients of all others."""
        if not self.interval.is_due(iteration):
            return None
        if not self.state.bases or iteration != self.state.last + 1:  # no chain may have a gap
            return full_plan(self, iteration)
        current = self.round_at(iteration)
        turns, turn = self.turns(current.window), iteration - current.start
        details = {
            operator.name: Detail.FULL if turns[operator.name] in (turn, _ALWAYS) else Detail.GRAD
            for operator in self.operators
        }
        needs = min(self._bases_after(iteration, details))
        complete = Detail.GRAD not in details.values()
        return SnapshotPlan(iteration, self.name, details, complete, since=current.start, needs=needs)

    def on_snapshot(self, plan: SnapshotPlan, load: Load | None = None) -> None:
        """As :meth:`Policy.on_snapshot`; a full snapshot is its own round."""
        current = GradientState(1, plan.iteration) if plan.complete else self.round_at(plan.iteration)
        bases = self._bases_after(plan.iteration, plan.operators)
        vars(self.state).update(window=current.window, start=current.start, last=plan.iteration, bases=bases)

    @property
    def storage(self) -> StorageSchedule:
        return GradientStorage(self)

    @property
    def schedule(self) -> SnapshotSchedule:
        return GradientSchedule(self)

    @property
    def report(self) -> PolicyReport:
        return GradientReport(self)

    def state_dict(self) -> dict[str, Any]:
        return decode.field_values(self.state) | {"bases": list(self.state.bases)}

    def loading(self, state: Mapping[str, Any]) -> Callable[[], None]:
        of = "gradient checkpoints"
        decoded = decode.convert_state(state, GradientState, of, requires_every_field=True)
        if len(decoded.bases) not in (0, len(self.operators)):
            raise StateError(
                f"this is no state of {of} of this model. Fix: start without it",
            )
        return lambda: vars(self.state).update(decode.field_values(decoded))

    def round_at(self, iteration: int) -> GradientState:
        """Returns the round of an iteration; a new one if the last has ended."""
        current = self.state
        if current.start <= iteration < current.start + current.window:
            return current
        return GradientState(self.window or self._measured_window(), iteration)

    def _measured_window(self) -> int:
        tuner = self.interval
        if not isinstance(tuner, WindowTuner) or not self.sizes or tuner.seconds is None or tuner.bandwidth is None:
            return 1
        full, gradients = self.sizes
        return tuner.limit(shortest_window(full, gradients, tuner.seconds, tuner.bandwidth))

    def _bases_after(self, iteration: int, details: Mapping[str, Detail]) -> list[int]:
        """Returns the bases after a snapshot with these details."""
        before = self.state.bases or [iteration] * len(self.operators)
        return [
            iteration if details[operator.name] is Detail.FULL else base
            for operator, base in zip(self.operators, before, strict=True)
        ]

    def turns(self, window: int) -> Mapping[str, int]:
        """Returns the turn of each operator in a round of ``window`` snapshots."""
        if window not in self._turns_by_window:
            turns: dict[str, int] = {}
            for queue in self._operator_queues:
                turns |= {operator.name: _ALWAYS for operator in queue if operator.kind == "router"}
                filled = [0] * min(window, len(queue))
                for operator in sorted(queue, key=lambda operator: -operator.parameters):  # ties: model order
                    if operator.name not in turns:
                        turns[operator.name] = turn = filled.index(min(filled))
                        filled[turn] += operator.parameters
            self._turns_by_window[window] = turns
        return self._turns_by_window[window]

    @cached_property
    def _turns_by_window(self) -> dict[int, Mapping[str, int]]:
        return {}

    @cached_property
    def _operator_queues(self) -> Sequence[list[Operator]]:
        """Operators by pipeline stage and expert-parallel rank; each queue saves equal parts in all turns."""
        number = Counter(operator.layer for operator in self.operators if operator.expert is not None)
        queues: dict[tuple[int, int], list[Operator]] = defaultdict(list)
        for operator in self.operators:
            rank = -1 if operator.expert is None else operator.expert * self.ep // number[operator.layer]
            queues[pipeline_stage(operator, self.stages), rank].append(operator)
        return list(queues.values())


@dataclass(frozen=True)
class GradientStorage(StorageSchedule):
    """Storage receives fewer gradients."""

    policy: Gradient

    def part_of(self, plan: SnapshotPlan) -> SnapshotPlan:
        """As :meth:`StorageSchedule.part_of`: in a round, gradients only after an operator's full save."""
        if plan.complete:
            return plan
        current = self.policy.round_at(plan.iteration)
        turns, turn = self.policy.turns(current.window), plan.iteration - current.start
        stored = {name: detail for name, detail in plan.operators.items() if turns[name] <= turn}
        return dataclasses.replace(plan, operators=stored)


@dataclass(frozen=True)
class GradientSchedule(SnapshotSchedule):
    """Rounds with one turn of each operator."""

    policy: Gradient

    @property
    def window_length(self) -> int:
        return max(1, self.policy.state.window)

    def restart_window(self) -> None:
        """As :meth:`SnapshotSchedule.restart_window`: a chain has a gap, so the next snapshot is full."""
        vars(self.policy.state).update(decode.field_values(GradientState()))


@dataclass(frozen=True)
class GradientReport(PolicyReport):
    """Window length, and the reason for its choice."""

    policy: Gradient

    def gauges(self) -> dict[str, float]:
        window = self.policy.state.window
        return {"gradient_window": window} if window else {}

    def reason(self) -> str | None:
        tuner = self.policy.interval
        return tuner.reason() if isinstance(tuner, WindowTuner) and self.policy.state.window else None


def shortest_window(full: float, gradients: float, hidden_s: float, rate: float) -> int:
    """Returns the shortest window whose snapshots can be copied during an iteration, at most :data:`MAX_WINDOW`.

    Args:
        full: bytes of the busiest rank for everything in full.
        gradients: bytes of the busiest rank for all gradients.
        hidden_s: seconds that a copy may take.
        rate: bytes per second from device to host.
    """
    sizes = {window: full / window + gradients * (1 - 1 / window) for window in range(1, MAX_WINDOW)}
    return next((window for window, size in sizes.items() if size <= hidden_s * rate), MAX_WINDOW)


def _overlapping_window(machine: Machine) -> int:
    """Returns the window that the policy would choose."""
    full = machine.full_snapshot.busiest
    return shortest_window(full, full * (machine.gradient_ratio or 1.0), machine.overlap_s, machine.copy_rate)
