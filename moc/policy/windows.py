"""Chooses the length of sparse snapshots' windows, and the operators that each iteration saves in full.

The functions of MoEvement's Algorithm 1 (section 3.5), its profiler, and the popularity of experts that orders them
(section 3.5, Appendices B and D).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median
from typing import Any

from moc.files import decode
from moc.policy.errors import PolicyError
from moc.policy.interface import SnapshotSizer
from moc.policy.interval import BLOCK, SNAPSHOTS, WARM_UP, Interval, ObservedIteration
from moc.state.operators import Detail, Operator

Scores = Mapping[int, Sequence[float]]
"""Popularity of each expert by layer: tokens, or any quantity that orders like tokens."""

FREQUENCY_CHANGE, SHARE_OF_EXPERTS = 0.10, 0.25
"""Relative change of frequency, and share of experts that must exceed it, for a reordering (section 3.5)."""


def kept_of_windows(window: int) -> int:
    """Returns how many snapshots recovery needs at most: a complete window, and all but the last of the next."""
    return 2 * window - 1


def activation_frequencies(scores: Scores) -> dict[int, list[float]]:
    """Returns each expert's share of its layer's total, by layer; zeros if the total is zero."""
    shares = {}
    for layer, row in scores.items():
        total = sum(row)
        shares[layer] = [score / total if total else 0.0 for score in row]
    return shares


def have_frequencies_changed(earlier: Scores, current: Scores) -> bool:
    """Returns whether activation frequencies differ by more than 10 % for at least 25 % of experts (section 3.5).

    Args:
        earlier: :func:`activation_frequencies` at the last reordering.
        current: current frequencies, with the same layers and experts.
    """
    pairs = [pair for layer in earlier for pair in zip(earlier[layer], current[layer], strict=True)]
    changed = sum(abs(new - old) > FREQUENCY_CHANGE * old for old, new in pairs)
    return bool(pairs) and changed >= SHARE_OF_EXPERTS * len(pairs)


def decayed_popularity(mean: Scores, counts: Scores, alpha: float) -> dict[int, list[float]]:
    """Returns the time-decayed popularity A(t) = alpha A(t-1) + (1 - alpha) counts of an iteration (Appendix B).

    Args:
        mean: A(t-1); empty before the first iteration.
        counts: tokens of this iteration.
        alpha: weight of the previous value, from 0 to 1.
    """
    zeros = {layer: [0.0] * len(row) for layer, row in counts.items()}
    return {
        layer: [alpha * old + (1 - alpha) * new for old, new in zip((mean or zeros)[layer], row, strict=True)]
        for layer, row in counts.items()
    }


def relative_popularity(scores: Scores, capacities: Scores) -> dict[int, list[float]]:
    """Returns popularity relative to each expert's capacity, A / C (Appendix B, capacity-aware ordering)."""
    return {layer: [a / c for a, c in zip(row, capacities[layer], strict=True)] for layer, row in scores.items()}


def hhi(counts: Sequence[float]) -> float:
    """Returns the Herfindahl-Hirschman index of a layer: the sum of squared shares of its experts (Appendix D).

    Raises:
        ValueError: the layer has no tokens.
    """
    total = sum(counts)
    if not total > 0:
        raise PolicyError(
            "no expert of this layer was given a token. Fix: count tokens first",
            code="counts-misfit",
        )
    return sum((count / total) ** 2 for count in counts)


def skewness(counts: Sequence[float]) -> float:
    """Returns S of Appendix D, from 0 (all experts of a layer are equally busy) to 1 (one expert has all tokens).

    Raises:
        ValueError: there are fewer than two experts, or no token.
    """
    if len(counts) < 2:
        raise PolicyError(
            f"skewness is between experts, and there is {len(counts)}. Fix: count the tokens of two experts or more",
            code="counts-misfit",
        )
    least = 1 / len(counts)
    return (hhi(counts) - least) / (1 - least)


def skew_gauges(counts: Scores) -> dict[str, float]:
    """Returns mean ``hhi`` and ``skewness`` of an iteration, over the layers with several experts and any tokens."""
    rows = [row for row in counts.values() if len(row) > 1 and sum(row) > 0]
    if not rows:
        return {}
    return {"hhi": fmean(map(hhi, rows)), "skewness": fmean(map(skewness, rows))}


MIN_ACTIVE = 2
"""Minimum number of operators in full per snapshot, even if it does not fit: Algorithm 1, line 10."""


@dataclass(frozen=True)
class OperatorBytes:
    """Bytes that one operator adds to a snapshot: as master weights and moments, or as compute weights."""

    full: float
    compute: float


@dataclass(frozen=True)
class Window:
    """W_sparse in iterations, and O_active, operators in full per iteration; the last one may save fewer."""

    length: int
    active: int


@dataclass(frozen=True)
class WindowStep:
    """Operators that one iteration of a window saves: its own in full, and later turns' as compute weights."""

    full: tuple[str, ...]
    compute: tuple[str, ...]


def find_window_size(sizes: Sequence[OperatorBytes], iteration_s: float, bandwidth: float) -> Window:
    """Returns the shortest window whose snapshots can be copied within an iteration (``FindWindowSize``).

    Algorithm 1 assumes equal operators, so the first snapshot of a window is the largest. Here sizes differ, so the
    largest snapshot has to fit; with equal sizes the two agree.

    Args:
        sizes: sizes of the operators, in the order of saving.
        iteration_s: seconds that a copy may take.
        bandwidth: bytes per second from device to host.

    Raises:
        ValueError: there is no operator, or time or bandwidth is not positive.
    """
    if not sizes or not iteration_s > 0 or not bandwidth > 0:
        raise PolicyError(
            f"a window of {len(sizes)} operators cannot be found for {iteration_s} s and {bandwidth} bytes/s. Fix: "
            "pass at least one operator, and a positive time and bandwidth",
            code="value-out-of-range",
        )
    active = len(sizes)
    while active > MIN_ACTIVE and largest_snapshot(sizes, active) / bandwidth > iteration_s:
        active -= 1
    return Window(math.ceil(len(sizes) / active), active)


def largest_snapshot(sizes: Sequence[OperatorBytes], active: int) -> float:
    """Returns the bytes of a window's largest snapshot, with ``active`` operators in full per iteration."""
    return max(snapshot_bytes(sizes, active))


def snapshot_bytes(sizes: Sequence[OperatorBytes], active: int) -> list[float]:
    """Returns the bytes of each snapshot of a window: operators in full, and compute weights for later turns."""
    full, compute = ([0, *accumulate(getattr(size, kind) for size in sizes)] for kind in ("full", "compute"))
    ends = ((start, min(start + active, len(sizes))) for start in range(0, len(sizes), active))
    return [full[end] - full[start] + compute[-1] - compute[end] for start, end in ends]


def generate_schedule(ordered: Sequence[str], active: int) -> list[WindowStep]:
    """Returns the turns of a window (``GenerateSchedule``): each operator is in full exactly once, then absent."""
    ends = ((start, start + active) for start in range(0, len(ordered), active))
    return [WindowStep(tuple(ordered[start:end]), tuple(ordered[end:])) for start, end in ends]


def merge_schedules(schedules: Sequence[Sequence[WindowStep]]) -> list[WindowStep]:
    """Merges the schedules of several pipeline stages, which save at the same time."""
    turns = []
    for position in range(max(map(len, schedules), default=0)):
        remaining = [schedule[position] for schedule in schedules if position < len(schedule)]
        turns.append(
            WindowStep(*(tuple(n for turn in remaining for n in getattr(turn, kind)) for kind in ("full", "compute")))
        )
    return turns


def order_operators(operators: Sequence[Operator], scores: Scores | None, ep: int = 1) -> list[Operator]:
    """Returns the operators of a pipeline stage in the order of saving (``OrderOperators``).

    Experts are first, the least popular before the others. An operator saved late stays frozen for most of the replay,
    which saves more work if it is busy. Operators that process every token follow in model order, as in Figure 6.
    Without experts, operators are saved back to front (Appendix E): input gradients are needed only behind the first
    operator that is not frozen.

    Expert-parallel ranks take turns, each with its own next expert, which balances every snapshot over ranks; the paper
    does not specify this.

    Args:
        operators: operators in model order.
        scores: popularity by layer and expert; None to order by expert number.
        ep: expert-parallel ranks, each holding an equal number of consecutive experts of a layer.
    """
    experts = {operator: operator.expert_id for operator in operators if operator.expert_id is not None}
    if not experts:
        return list(reversed(operators))
    number: dict[int, int] = {}
    for layer, expert in experts.values():
        number[layer] = max(number.get(layer, 0), expert + 1)

    def score(operator: Operator) -> float:
        layer, expert = experts[operator]
        return 0.0 if scores is None else scores[layer][expert]

    of_rank: dict[int, list[Operator]] = {}
    for operator in sorted(experts, key=score):  # ties: model order
        layer, expert = experts[operator]
        of_rank.setdefault(expert * ep // number[layer], []).append(operator)
    positions = {operator: position for queue in of_rank.values() for position, operator in enumerate(queue)}
    first = sorted(experts, key=lambda operator: (positions[operator], score(operator)))
    return first + [operator for operator in operators if operator.expert is None]


def pipeline_stage(operator: Operator, stages: Sequence[int]) -> int:
    """Returns the pipeline stage of an operator; ``stages`` has the stage of each layer, empty for a single stage."""
    if not stages:
        return 0
    if operator.layer is not None:
        return stages[operator.layer]
    return stages[-1 if operator.kind == "output" else 0]


def operators_of_stages(operators: Iterable[Operator], stages: Sequence[int]) -> dict[int, list[Operator]]:
    """Returns the operators of each pipeline stage, in model order; ``stages`` as in :func:`pipeline_stage`."""
    by_stage: dict[int, list[Operator]] = {}
    for operator in operators:
        by_stage.setdefault(pipeline_stage(operator, stages), []).append(operator)
    return by_stage


def operator_sizes(sizer: SnapshotSizer, stages: Iterable[Sequence[Operator]]) -> dict[str, OperatorBytes]:
    """Returns the bytes that each operator adds to its stage's busiest rank, by name; a collective call.

    A snapshot takes about the same share of every rank, so its size is the sum over its operators.
    """
    sizes = {}
    for operators in stages:
        parameters = sum(operator.parameters for operator in operators)
        names = [operator.name for operator in operators]
        full, compute = (sizer(dict.fromkeys(names, d)) / parameters for d in (Detail.FULL, Detail.COMPUTE))
        for operator in operators:
            sizes[operator.name] = OperatorBytes(full * operator.parameters, compute * operator.parameters)
    return sizes


def operators_by_stage(
    sizer: SnapshotSizer, operators: Sequence[Operator], ep: int, stages: Sequence[int]
) -> list[list[OperatorBytes]]:
    """Returns the bytes that each operator adds to a snapshot, by pipeline stage, in an order of saving."""
    by_stage = operators_of_stages(operators, stages).values()
    sizes = operator_sizes(sizer, by_stage)
    return [[sizes[operator.name] for operator in order_operators(stage, None, ep)] for stage in by_stage]


@dataclass(frozen=True)
class _StoredWindowTuner:
    """State of a window tuner: seconds, and bytes per second."""

    forward_backward_s: tuple[decode.Positive, ...] = ()
    bandwidths: tuple[decode.Positive, ...] = ()


class WindowTuner(Interval):
    """Measures copies and computation during training (the profiler of MoEvement's Algorithm 1, line 8).

    The first ``WARM_UP`` iterations are skipped and ``BLOCK`` are measured without a snapshot. From then on every
    iteration takes one. The window follows from medians of recent values: copy bandwidth, and the time from the start
    of an iteration to its commit all-reduce, which a copy can overlap. The paper uses the whole iteration, though
    training waits for a copy before the update.
    """

    def __init__(self):
        self._warm_up_count = 0
        self._seconds: deque[float] = deque(maxlen=BLOCK)
        self._bandwidths: deque[float] = deque(maxlen=SNAPSHOTS)
        self._max_length: int | None = None

    def limit_window_length(self, length: int) -> None:
        self._max_length = length

    def limit(self, length: int) -> int:
        """Returns a length, or the limit if the length exceeds it."""
        return length if self._max_length is None else min(length, self._max_length)

    def observe(self, observed: ObservedIteration) -> None:
        if observed.copied.bytes and observed.copied.seconds:
            self._bandwidths.append(observed.copied.bytes / observed.copied.seconds)
        if self._warm_up_count < WARM_UP:
            self._warm_up_count += 1
        elif observed.forward_backward_s > 0:
            self._seconds.append(observed.forward_backward_s)

    def is_due(self, iteration: int) -> bool:
        """Returns True for every iteration once enough of them are measured."""
        return iteration > 0 and len(self._seconds) == BLOCK

    @property
    def seconds(self) -> float | None:
        """Seconds that a copy can overlap; None until measured."""
        return median(self._seconds) if self._seconds else None

    @property
    def bandwidth(self) -> float | None:
        """Copy bandwidth of a rank in bytes per second; None until measured."""
        return median(self._bandwidths) if self._bandwidths else None

    def reason(self) -> str | None:
        """Returns the measurements that a window follows from, as text; None until measured."""
        if self.bandwidth is None:
            return None
        return f"a rank copies {self.bandwidth / 1e9:.3g} GB/s, and an iteration leaves it {self.seconds:.3g} s"

    def state_dict(self) -> dict[str, Any]:
        """Returns the measurements."""
        return {"forward_backward_s": list(self._seconds), "bandwidths": list(self._bandwidths)}

    def loading(self, state: Mapping[str, Any]) -> Callable[[], None]:
        stored = decode.convert_state(state, _StoredWindowTuner, "a tuner")

        def load() -> None:
            self._seconds = deque(stored.forward_backward_s, maxlen=BLOCK)
            self._bandwidths = deque(stored.bandwidths, maxlen=SNAPSHOTS)
            self._warm_up_count = 0

        return load
