"""Saves some operators in full in each iteration, until a window has every operator (sparse checkpointing)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from moc.files import decode
from moc.files.decode import Amount, Count, StateError
from moc.policy.costs import Machine, PolicyCosts, PolicySettings, Price, SnapshotSizes
from moc.policy.errors import PolicyError
from moc.policy.flags import FlagValues, JobShape, PolicyFlag, PolicyFlags, every_iteration, number_or_auto
from moc.policy.interface import (
    Capability,
    Load,
    Policy,
    PolicyReport,
    SnapshotPlan,
    SnapshotSchedule,
    SnapshotSizer,
    add_requirements,
)
from moc.policy.interval import Every
from moc.policy.partial import check_tables, experts_by_layer
from moc.policy.registry import policy
from moc.policy.windows import (
    OperatorBytes,
    Scores,
    WindowStep,
    WindowTuner,
    activation_frequencies,
    decayed_popularity,
    find_window_size,
    generate_schedule,
    have_frequencies_changed,
    kept_of_windows,
    merge_schedules,
    operator_sizes,
    operators_of_stages,
    order_operators,
    pipeline_stage,
    relative_popularity,
    skew_gauges,
    snapshot_bytes,
)
from moc.state.operators import Detail, Operator

ORDERS = ("popularity", "soft", "decayed", "capacity", "index")


@dataclass(frozen=True)
class CurrentWindow:
    """The current window, or the last one.

    Attributes:
        start: iteration of its first snapshot; 0 before the first window.
        length: planned number of iterations; rounding may reduce it.
        turns: operators that each iteration saves; not stored, since they follow from order and length.
        order: indices of the operators in the model, stage by stage, in the order of saving.
        shares: activation frequencies of the experts at the last reordering, by layer.
    """

    start: int = 0
    length: int = 0
    turns: tuple[WindowStep, ...] = ()
    order: tuple[int, ...] = ()
    shares: Scores = field(default_factory=dict)

    def contains(self, iteration: int) -> bool:
        """Returns whether a snapshot of this iteration is part of the window."""
        return self.start <= iteration < self.start + len(self.turns)


@dataclass
class SparseState:
    """State of the policy; stored with snapshots.

    Attributes:
        current: the current window.
        iteration: iteration of the last snapshot.
        load: tokens by layer and expert at the last snapshot.
        counts: tokens per iteration up to the last snapshot.
        mean: time-decayed ``counts``.
        probabilities: sum of gating probabilities since training began, by layer and expert.
    """

    current: CurrentWindow = field(default_factory=CurrentWindow)
    iteration: int = 0
    load: Scores = field(default_factory=dict)
    counts: Scores = field(default_factory=dict)
    mean: Scores = field(default_factory=dict)
    probabilities: Scores = field(default_factory=dict)


@dataclass(frozen=True)
class _StoredSparseState:
    """State in a snapshot: :class:`SparseState` and :class:`CurrentWindow`; ``turns`` is the number of turns."""

    iteration: Count
    order: tuple[Count, ...]
    shares: _Table
    load: _Table
    counts: _Table
    mean: _Table
    probabilities: _Table
    start: Count = 0
    length: Count = 0
    turns: Count = 0


_Table = dict[Count, list[Amount]]

_TABLES = ("load", "counts", "mean", "probabilities")


class SparseFlags(PolicyFlags):
    """Flags of sparse checkpoints."""

    specs = (
        PolicyFlag(
            "sparse_window",
            str,
            "auto",
            "With --ckpt-policy sparse: iterations, at most, over which the operators of the model are spread; auto "
            "chooses the fewest whose snapshots are copied during an iteration.",
            parse=number_or_auto,
            metavar="N|auto",
            chosen_by_auto=True,
        ),
        PolicyFlag(
            "sparse_order",
            str,
            "popularity",
            "By what experts are sorted in such a window, the first ones being saved first: tokens since training "
            "began; the same of gating probabilities; tokens of late; tokens for each one's capacity; their numbers.",
            choices=ORDERS,
        ),
    )
    conflicts = (every_iteration("sparse"),)

    def settings(self, flags: FlagValues, job: JobShape) -> dict[str, Any]:
        return {"window": 0 if flags.sparse_window == "auto" else int(flags.sparse_window)}


class SparseCosts(PolicyCosts):
    """Every window up to one beyond the shortest that overlaps fully, and its price."""

    def candidates(self, machine: Machine) -> Iterator[PolicySettings]:
        lengths = (find_window_size(stage, machine.overlap_s, machine.copy_rate).length for stage in machine.stages)
        return ({"window": window} for window in range(1, max(lengths) + 2))

    def price(self, machine: Machine, settings: PolicySettings) -> Price:
        """As :meth:`PolicyCosts.price`; by default, the window is the shortest that overlaps fully."""
        windows = []
        for stage in machine.stages:
            if settings.get("window"):
                active = math.ceil(len(stage) / settings["window"])
            else:
                active = find_window_size(stage, machine.overlap_s, machine.copy_rate).active
            windows.append(snapshot_bytes(stage, active))
        snapshots = max(windows, key=sum)
        size = SnapshotSizes(sum(snapshots), machine.ranks * sum(snapshots))
        length = max(map(len, windows))
        return Price(size, snapshots, window_length=length, snapshots_in_memory=kept_of_windows(length))


@policy("sparse", flags=SparseFlags(), costs=SparseCosts(), requires=[Capability.REPLAY])
@dataclass(frozen=True)
class Sparse(Policy):
    """MoEvement's sparse checkpoints (Gandhi, Kozyrakis, NSDI 2026, sections 3.2 and 3.5, Algorithm 1).

    Every iteration takes a snapshot; the first one saves everything, so a run can resume before a window is complete.
    In a window of W snapshots, each operator is saved in full once, before that as compute weights only, and not
    afterwards. A run resumes at the end of a window. It loads the first snapshot and replays the following iterations,
    with each operator frozen until the snapshot that saves it in full (section 3.3). The result is bit-identical.

    Window length and order change only between windows.

    Attributes:
        window: maximum of W; 0 to choose it from measurements.
        order: sort key of the experts: ``popularity``, tokens since training began; ``soft``, gating probabilities
            since training began; ``decayed``, time-decayed tokens; ``capacity``, tokens relative to the expert's
            capacity; ``index``, expert number.
        ep: expert-parallel ranks.
        stages: pipeline stage of each layer; empty for a single stage.
        alpha: weight of the previous value in the decayed popularity.
        capacities: capacity of each expert, by layer; empty if all are equal.
        state: state of the policy; stored with snapshots.
        sizes: bytes that each operator adds to the snapshot of its stage's busiest rank.

    Raises:
        ValueError: a setting is invalid.
    """

    window: int = 0
    order: str = "popularity"
    ep: int = 1
    stages: tuple[int, ...] = ()
    alpha: float = 0.9
    capacities: Mapping[int, tuple[float, ...]] = field(default_factory=dict, hash=False)
    state: SparseState = field(default_factory=SparseState, compare=False)
    sizes: dict[str, OperatorBytes] = field(default_factory=dict, compare=False)

    def __post_init__(self):
        if self.window < 0:
            raise PolicyError(
                f"a window of {self.window} iterations is not possible. Fix: set a window of 1 or more iterations",
                code="value-out-of-range",
            )
        if self.order not in ORDERS:
            raise PolicyError(
                f"there is no order called {self.order}. Fix: choose one of {', '.join(ORDERS)}",
                code="value-not-a-choice",
            )
        object.__setattr__(self, "interval", Every(1) if self.window else WindowTuner())
        if any(operator.expert is not None for operator in self.operators):  # for the order and the skewness gauges
            probabilities = {Capability.GATING_PROBABILITIES} if self.order == "soft" else set()
            add_requirements(self, {Capability.TOKEN_COUNTS} | probabilities)

    def on_sizes(self, sizer: SnapshotSizer) -> None:
        """As :meth:`Policy.on_sizes`: bytes that each operator adds to its stage's busiest rank."""
        if not self.window:
            self.sizes.update(operator_sizes(sizer, self._stages.values()))

    def plan(self, iteration: int, load: Load | None = None) -> SnapshotPlan | None:
        """Returns the operators of this turn in full, and the compute weights of later turns' operators."""
        if not self.interval.is_due(iteration):
            return None
        return self.plan_in_window(self._window_at(iteration, load), iteration)

    def on_snapshot(self, plan: SnapshotPlan, load: Load | None = None) -> None:
        """As :meth:`Policy.on_snapshot`; a full snapshot ends the window early."""
        current = self._window_at(plan.iteration, load)
        if plan.complete:
            full_step = WindowStep(tuple(plan.operators), ())
            current = dataclasses.replace(current, start=plan.iteration, length=1, turns=(full_step,))
        self.state.current = current
        if load is not None:
            self.state.counts, self.state.mean = self._counts(plan.iteration, load), self._mean(plan.iteration, load)
            self.state.load = load
        self.state.iteration = plan.iteration

    @property
    def schedule(self) -> SnapshotSchedule:
        return SparseSchedule(self)

    @property
    def report(self) -> PolicyReport:
        return SparseReport(self)

    def on_routing(self, probabilities: Scores) -> None:
        before = self.state.probabilities
        self.state.probabilities = {
            layer: [sum(pair) for pair in zip(before.get(layer, [0.0] * len(row)), row, strict=True)]
            for layer, row in probabilities.items()
        }

    def state_dict(self) -> dict[str, Any]:
        state, current = self.state, self.state.current
        plain = {"iteration": state.iteration, "order": list(current.order), "shares": _table(current.shares)}
        window = {"start": current.start, "length": current.length, "turns": len(current.turns)}
        return plain | window | {name: _table(getattr(state, name)) for name in _TABLES}

    def loading(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """As :meth:`Policy.loading`; the next snapshot takes the next turn of an unfinished window."""
        of = "sparse checkpoints"
        stored = decode.convert_state(state, _StoredSparseState, of)
        tables = {name: getattr(stored, name) for name in _TABLES}
        check_tables([stored.shares, *tables.values()], experts_by_layer(self.operators), of)
        if stored.order and sorted(stored.order) != list(range(len(self.operators))):
            raise StateError(
                f"this is no state of {of} of this model (its operators are others). Fix: start without it",
            )
        turns = self._turns(stored.order, stored.length) if stored.order and stored.length else ()
        turns = turns if len(turns) == stored.turns else ()  # another layout has other queues
        decoded = SparseState(
            CurrentWindow(stored.start, stored.length, turns, stored.order, stored.shares), stored.iteration, **tables
        )
        return lambda: vars(self.state).update(decode.field_values(decoded))

    def _window_at(self, iteration: int, load: Load | None) -> CurrentWindow:
        """Returns the window of an iteration; a new one if the last has ended."""
        current = self.state.current
        if current.contains(iteration):
            return current
        order, shares = current.order, current.shares
        scores = self._scores(iteration, load)
        frequencies = {} if scores is None else activation_frequencies(scores)
        if (
            len(order) != len(self.operators)
            or frequencies.keys() != shares.keys()
            or have_frequencies_changed(shares, frequencies)
        ):
            indices = {operator.name: index for index, operator in enumerate(self.operators)}
            queues = (order_operators(operators, scores, self.ep) for operators in self._stages.values())
            order, shares = tuple(indices[operator.name] for queue in queues for operator in queue), frequencies
        length = 1 if not current.order else self.window or self._affordable(self._queues(order))
        return CurrentWindow(iteration, length, self._turns(order, length), order, shares)

    def plan_in_window(self, current: CurrentWindow, iteration: int) -> SnapshotPlan:
        """Returns the plan of a window's snapshot."""
        turn = current.turns[iteration - current.start]
        detail_by_name = dict.fromkeys(turn.full, Detail.FULL) | dict.fromkeys(turn.compute, Detail.COMPUTE)
        details = {
            operator.name: detail_by_name[operator.name]
            for operator in self.operators
            if operator.name in detail_by_name
        }
        complete = len(turn.full) == len(self.operators)
        return SnapshotPlan(iteration, self.name, details, complete, since=current.start)

    def _turns(self, order: tuple[int, ...], length: int) -> tuple[WindowStep, ...]:
        queues = [[operator.name for operator in queue] for queue in self._queues(order)]
        return tuple(merge_schedules([generate_schedule(queue, math.ceil(len(queue) / length)) for queue in queues]))

    def _queues(self, order: tuple[int, ...]) -> list[list[Operator]]:
        """Returns the operators by pipeline stage, in the order of saving."""
        ordered = [self.operators[index] for index in order]
        return [
            [operator for operator in ordered if pipeline_stage(operator, self.stages) == stage]
            for stage in sorted(self._stages)
        ]

    def _affordable(self, queues: list[list[Operator]]) -> int:
        """Returns W_sparse of the slowest stage; 1 until a copy has been measured."""
        tuner = self.interval
        if not isinstance(tuner, WindowTuner) or tuner.seconds is None or tuner.bandwidth is None:
            return 1
        seconds, bandwidth = tuner.seconds, tuner.bandwidth
        usual = {
            operator.name: OperatorBytes(12 * operator.parameters, 2 * operator.parameters)
            for operator in self.operators
        }
        sizes = self.sizes or usual  # master weights and two moments in fp32, 16-bit compute weights: section 3.2
        queued = ([sizes[operator.name] for operator in queue] for queue in queues)
        return tuner.limit(max(find_window_size(queue, seconds, bandwidth).length for queue in queued))

    def _scores(self, iteration: int, load: Load | None) -> Scores | None:
        if load is None or self.order == "index":
            return None
        if self.order == "soft":
            return self.state.probabilities or None
        if self.order == "decayed":
            return self._mean(iteration, load)
        if self.order == "capacity" and self.capacities:
            return relative_popularity(load, self.capacities)
        return load

    def _counts(self, iteration: int, load: Load) -> dict[int, list[float]]:
        """Returns the tokens per iteration: the mean since the last snapshot."""
        before, passed = self.state.load, max(1, iteration - self.state.iteration)
        return {
            layer: [
                (current - earlier) / passed
                for current, earlier in zip(row, before.get(layer, [0] * len(row)), strict=True)
            ]
            for layer, row in load.items()
        }

    def _mean(self, iteration: int, load: Load) -> dict[int, list[float]]:
        return decayed_popularity(self.state.mean, self._counts(iteration, load), self.alpha)

    @cached_property
    def _stages(self) -> dict[int, list[Operator]]:
        """The operators of each pipeline stage, in model order."""
        return operators_of_stages(self.operators, self.stages)


@dataclass(frozen=True)
class SparseSchedule(SnapshotSchedule):
    """Windows that save each operator in full once."""

    policy: Sparse

    @property
    def window_length(self) -> int:
        return max(1, len(self.policy.state.current.turns))

    def current_window(self, iteration: int) -> tuple[SnapshotPlan, ...]:
        policy, current = self.policy, self.policy.state.current
        if policy.state.iteration != iteration or not current.contains(iteration):
            return ()
        return tuple(
            policy.plan_in_window(current, saved_iteration) for saved_iteration in range(current.start, iteration + 1)
        )

    def restart_window(self) -> None:
        """As :meth:`SnapshotSchedule.restart_window`; keeps the order."""
        state = self.policy.state
        state.current = dataclasses.replace(state.current, start=0, length=0, turns=())


@dataclass(frozen=True)
class SparseReport(PolicyReport):
    """Window length, the reason for its choice, and skewness of experts."""

    policy: Sparse

    def gauges(self) -> dict[str, float]:
        """As :meth:`PolicyReport.gauges`: window length and recent skewness of experts (Appendix D)."""
        return self.chosen() | skew_gauges(self.policy.state.counts)

    def chosen(self) -> dict[str, float]:
        turns = self.policy.state.current.turns
        return {"sparse_window": len(turns)} if turns else {}

    def reason(self) -> str | None:
        tuner = self.policy.interval
        if not isinstance(tuner, WindowTuner) or not self.policy.state.current.turns:
            return None
        return tuner.reason()


def _table(rows: Mapping[Any, Any]) -> dict[int, list[float]]:
    return {int(layer): [float(x) for x in row] for layer, row in rows.items()}
