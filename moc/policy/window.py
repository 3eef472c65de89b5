"""A window of sparse snapshots: how long it is, and which operators each of its iterations saves in full.

The functions of MoEvement's Algorithm 1 (section 3.5), without side effects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from moc.policy.popularity import Scores
from moc.state.operators import Operator

FEWEST = 2
"""Operators in full that even a snapshot has which does not fit: Algorithm 1, line 10."""


@dataclass(frozen=True)
class OperatorBytes:
    """What one operator adds to a snapshot, in bytes.

    Attributes:
        full: its master weights and moments.
        compute: its compute weights.
    """

    full: float
    compute: float


@dataclass(frozen=True)
class Window:
    """An answer of :func:`find_window_size`.

    Attributes:
        length: W_sparse, iterations.
        active: O_active, operators that each of them saves in full; the last one may have fewer.
    """

    length: int
    active: int


@dataclass(frozen=True)
class Turn:
    """What one iteration of a window saves.

    Attributes:
        full: operators whose turn it is.
        compute: those that are still to come.
    """

    full: tuple[str, ...]
    compute: tuple[str, ...]


def find_window_size(sizes: Sequence[OperatorBytes], iteration_s: float, bandwidth: float) -> Window:
    """The shortest window whose snapshots can be copied within an iteration (``FindWindowSize``).

    Algorithm 1 reckons with operators of one size, where the first snapshot of a window is the largest.  Here each has
    its own, so it is the largest of the window's snapshots that has to fit; with equal sizes that is the same.

    Args:
        sizes: of the operators, in the order in which they are saved.
        iteration_s: seconds that a copy may take.
        bandwidth: bytes per second from the device to the host.

    Raises:
        ValueError: there is no operator, or no time or bandwidth.
    """
    if not sizes or not iteration_s > 0 or not bandwidth > 0:
        raise ValueError(
            f"a window of {len(sizes)} operators cannot be found for {iteration_s} s and {bandwidth} bytes/s: all must "
            "be positive"
        )
    active = len(sizes)
    while active > FEWEST and largest_snapshot(sizes, active) / bandwidth > iteration_s:
        active -= 1
    return Window(math.ceil(len(sizes) / active), active)


def largest_snapshot(sizes: Sequence[OperatorBytes], active: int) -> float:
    """Bytes of the largest snapshot of a window; arguments as of :func:`find_window_size`."""
    return max(snapshot_bytes(sizes, active))


def snapshot_bytes(sizes: Sequence[OperatorBytes], active: int) -> list[float]:
    """Bytes of each snapshot of a window: operators in full, and the compute weights of those that are to come."""
    full, compute = ([0, *accumulate(getattr(size, kind) for size in sizes)] for kind in ("full", "compute"))
    ends = ((start, min(start + active, len(sizes))) for start in range(0, len(sizes), active))
    return [full[end] - full[start] + compute[-1] - compute[end] for start, end in ends]


def generate_schedule(ordered: Sequence[str], active: int) -> list[Turn]:
    """The iterations of a window (``GenerateSchedule``): each operator is in full exactly once, and not saved after it.

    Args:
        ordered: the names of all operators, in the order in which they are saved.
        active: operators in full in each iteration.
    """
    ends = ((start, start + active) for start in range(0, len(ordered), active))
    return [Turn(tuple(ordered[start:end]), tuple(ordered[end:])) for start, end in ends]


def side_by_side(schedules: Sequence[Sequence[Turn]]) -> list[Turn]:
    """One schedule of those of several pipeline stages, which save at the same time."""
    turns = []
    for place in range(max(map(len, schedules), default=0)):
        there = [schedule[place] for schedule in schedules if place < len(schedule)]
        turns.append(Turn(*(tuple(n for turn in there for n in getattr(turn, kind)) for kind in ("full", "compute"))))
    return turns


def order_operators(operators: Sequence[Operator], scores: Scores | None, ep: int = 1) -> list[Operator]:
    """The order in which the operators of a pipeline stage are saved (``OrderOperators``).

    Experts come first, the least popular ones before the others, since what is saved late is frozen for long when
    it is replayed, which saves the more the more it has to do.  What every token passes comes after them, in model
    order, as in Figure 6.  Where there are no experts, operators go from the back to the front (Appendix E): the
    gradient of an input is needed only behind the first operator that learns.

    Expert-parallel ranks take turns, each with its own next expert, so that no snapshot has more of one rank than of
    another; the paper does not speak of that.

    Args:
        operators: in model order.
        scores: popularity by layer and expert; None for the order of their numbers.
        ep: expert-parallel ranks; each holds as many neighbouring experts of a layer.
    """
    experts = {operator: operator.place for operator in operators if operator.place is not None}
    if not experts:
        return list(reversed(operators))
    number: dict[int, int] = {}
    for layer, expert in experts.values():
        number[layer] = max(number.get(layer, 0), expert + 1)

    def score(operator: Operator) -> float:
        layer, expert = experts[operator]
        return 0.0 if scores is None else scores[layer][expert]

    of_rank: dict[int, list[Operator]] = {}
    for operator in sorted(experts, key=score):  # of equal ones, the first of the model
        layer, expert = experts[operator]
        of_rank.setdefault(expert * ep // number[layer], []).append(operator)
    places = {operator: place for queue in of_rank.values() for place, operator in enumerate(queue)}
    first = sorted(experts, key=lambda operator: (places[operator], score(operator)))
    return first + [operator for operator in operators if operator.expert is None]
