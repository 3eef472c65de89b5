"""How many iterations lie between snapshots: a fixed number, or as few as a budget of overhead allows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median, median_high
from typing import Any

WARM_UP = 5
"""Iterations at the start that are not measured: they allocate, compile and connect."""

BLOCK = 10
"""Undisturbed iterations that are averaged to one figure, and that lie between the first snapshots."""

PROFILE_BLOCKS = 3
"""Figures that are needed before the first snapshot."""

BLOCKS = 5
"""Newest figures, of which the median counts."""

SNAPSHOTS = 3
"""Newest snapshots whose median counts; so many are also taken before an interval is chosen."""

REFRESH = 200
"""After so many iterations without a new figure of undisturbed ones, the next snapshot waits for one."""


@dataclass(frozen=True)
class Transfer:
    """What went from one place to another: means over ranks.

    Attributes:
        bytes: so many.
        seconds: that it took.
    """

    bytes: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Observed:
    """What has been measured in one iteration.

    All values are such that every rank has the same, as the means that a vote brings.  Time for evaluation, logging or
    dense ``--save`` checkpoints must not be in them.

    Attributes:
        iteration_s: seconds that it took, with ``stall_s``.
        stall_s: seconds of these for which training stood still because of snapshots.
        started: a snapshot was started in it.
        busy: on some rank, one is not persisted yet.
        forward_backward_s: seconds of these before the update; a snapshot can hide in them.
        copied: the snapshots of which it became known that all ranks have copied them.
        written: the same of those that were written to storage.
        replicated: the same of those that were copied to other nodes; means over nodes.
    """

    iteration_s: float
    stall_s: float = 0.0
    started: bool = False
    busy: bool = False
    forward_backward_s: float = 0.0
    copied: Transfer = Transfer()
    written: Transfer = Transfer()
    replicated: Transfer = Transfer()


class Interval(ABC):
    """When a snapshot is due.  The same on every rank, as long as every rank is told the same."""

    @abstractmethod
    def due(self, iteration: int) -> bool:
        """Whether a snapshot is to be taken now.  Asking changes nothing.

        Args:
            iteration: iterations completed.
        """

    def observe(self, seen: Observed) -> None:  # noqa: B027
        """Learns what has been since the last call; to be called once per iteration, before :meth:`due`."""

    def state_dict(self) -> dict[str, Any]:
        """What was learned, as JSON can hold it; to be stored with a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Goes on from what was learned, as if a snapshot had just been persisted.

        To be called with the same state on all ranks: after a restart, and also where a rank has been replaced, by the
        survivors.

        Raises:
            ValueError: the state is no such thing.
        """


@dataclass(frozen=True)
class Every(Interval):
    """A snapshot whenever the iterations completed are a multiple of a number, whatever it costs.

    Raises:
        ValueError: the number is below 1.
    """

    interval: int

    def __post_init__(self):
        if self.interval < 1:
            raise ValueError(f"a snapshot every {self.interval} iterations is not possible: take 1 or more")

    def due(self, iteration: int) -> bool:
        """Whether the iteration is a multiple, and not 0."""
        return iteration > 0 and iteration % self.interval == 0


@dataclass
class _Flight:
    """The last snapshot, from its start."""

    iterations: int = 0
    seconds: float = 0.0
    stall_s: float = 0.0

    def cost(self, iteration_s: float) -> float:
        """Seconds that training lost: it stood still, or ran slower while the snapshot was under way."""
        return self.stall_s + max(0.0, self.seconds - self.iterations * iteration_s)


class IntervalTuner(Interval):
    """The shortest interval at which snapshots cost no more than a budget: CheckFreq's policy.

    From CheckFreq (Mohan, Phanishayee, Chidambaram, FAST 2021) come the two conditions: a snapshot starts only when the
    one before it is persisted, and the time that training loses stays within a share ``budget`` of its time; and that
    it is measured during training, first to choose an interval and then to adapt it.  MoEvement gives it 3 %
    (section 5.2), and gets intervals of 57 to 124 iterations for its models (Table 3).

    The first ``WARM_UP`` iterations are passed over and ``PROFILE_BLOCKS * BLOCK`` measured without a snapshot.  Then
    come ``SNAPSHOTS`` snapshots, with ``BLOCK`` undisturbed iterations or so behind each, and from there on::

        T = median over the last BLOCKS of the mean of BLOCK undisturbed iterations                          [seconds]
        d = iterations from the start of a snapshot until it is found persisted
        C = stalls + max(0, time of these d iterations without the stalls - d T)            [seconds that one costs]
        interval = max(1, median of d, ceil(median of C / (budget T)))          medians over the last SNAPSHOTS ones

    It is worked out anew after every snapshot, so it grows when they become dearer or iterations shorter, and shrinks
    in the opposite cases.  Means are taken where a slowdown may come in bursts, medians over them so that a hiccup,
    or one slow snapshot, does not count; a lasting change counts with the second snapshot that shows it, and a change
    of T when most of the BLOCKS show it.  Where snapshots follow so closely that no iteration is undisturbed, one in
    ``REFRESH`` iterations waits until ``BLOCK`` were, since T would be out of date otherwise.

    What is different: CheckFreq's published implementation stops training to profile with trial snapshots, where ours
    are ordinary ones that are kept; its first interval follows from the time to persist alone; it measures on rank 0,
    adds two iterations whenever the time between checkpoints was over the budget, and never shortens.  It also chooses
    between snapshots in the GPU's memory and in the host's, which is not decided here.

    Args:
        budget: share of the time without snapshots that they may cost, 0.03 for 3 %.

    Raises:
        ValueError: the budget is not a positive number.
    """

    def __init__(self, budget: float = 0.03):
        if not (math.isfinite(budget) and budget > 0):
            raise ValueError(f"an overhead budget of {budget} is not possible: take a fraction above 0, such as 0.03")
        self.budget = budget
        self._blocks: deque[float] = deque(maxlen=BLOCKS)
        self._landed: deque[tuple[int, float]] = deque(maxlen=SNAPSHOTS)
        self._begin()

    def _begin(self) -> None:
        """Forgets what is under way."""
        self._passed_over = 0
        self._block: list[float] = []
        self._flight: _Flight | None = None
        self._busy = False
        self._since_start = self._since_block = 0

    def observe(self, seen: Observed) -> None:
        """As :meth:`Interval.observe`.

        Raises:
            ValueError: a time is not a number, no time has passed, or the stall is negative.
        """
        iteration_s, stall_s = seen.iteration_s, seen.stall_s
        if not (math.isfinite(iteration_s) and math.isfinite(stall_s) and iteration_s > 0 and stall_s >= 0):
            raise ValueError(f"an iteration of {iteration_s} s with a stall of {stall_s} s cannot have been measured")
        disturbed = seen.started or seen.busy or self._busy
        if seen.started:
            self._start()
        self._busy = seen.busy
        self._since_start += 1
        self._since_block += 1
        if self._passed_over < WARM_UP:
            self._passed_over += 1
            self._flight = None
        elif disturbed or stall_s:
            self._count(max(0.0, iteration_s - stall_s), stall_s, disturbed)
        else:
            self._count_undisturbed(seen)

    def _start(self) -> None:
        if self._flight and not self._busy:
            self._landed.append(self._measured(self._flight))
        self._flight = _Flight()
        self._since_start = 0

    def _count(self, seconds: float, stall_s: float, disturbed: bool) -> None:
        # What began while iterations were passed over is not known in full.
        if self._flight is None:
            return
        self._flight.stall_s += stall_s
        if disturbed:
            self._flight.iterations += 1
            self._flight.seconds += seconds

    def _count_undisturbed(self, seen: Observed) -> None:
        self._block.append(seen.iteration_s)
        if len(self._block) == BLOCK:
            self._blocks.append(math.fsum(self._block) / BLOCK)
            self._block, self._since_block = [], 0

    def _measured(self, flight: _Flight) -> tuple[int, float]:
        iteration_s = self.iteration_s
        return flight.iterations, flight.stall_s if iteration_s is None else flight.cost(iteration_s)

    def _known(self) -> list[tuple[int, float]]:
        """Iterations and seconds of the last snapshots that are persisted."""
        newest = [self._measured(self._flight)] if self._flight and not self._busy else []
        return [*self._landed, *newest][-SNAPSHOTS:]

    def due(self, iteration: int) -> bool:
        """Whether the last snapshot is persisted and began long enough ago, whatever the number of the iteration."""
        if self._busy or len(self._blocks) < PROFILE_BLOCKS:
            return False
        if not self.settled:
            return self._since_block < self._since_start
        return self._since_start >= self.interval and self._since_block < REFRESH

    @property
    def settled(self) -> bool:
        """Whether enough has been measured to choose an interval."""
        return len(self._blocks) >= PROFILE_BLOCKS and len(self._known()) >= SNAPSHOTS

    @property
    def interval(self) -> int:
        """Iterations from one snapshot to the next, at least 1; provisional until :attr:`settled`."""
        known, iteration_s = self._known(), self.iteration_s
        if not known or iteration_s is None:
            return BLOCK
        affordable = math.ceil(median(cost for _, cost in known) / (self.budget * iteration_s))
        return max(1, median_high(iterations for iterations, _ in known), affordable)

    @property
    def iteration_s(self) -> float | None:
        """Seconds of an iteration that no snapshot disturbs; None while not known."""
        return median(self._blocks) if self._blocks else None

    @property
    def snapshot_s(self) -> float | None:
        """Seconds that training loses by a snapshot; None while not known."""
        known = self._known()
        return median(cost for _, cost in known) if known else None

    @property
    def overhead(self) -> float | None:
        """Share of the time without snapshots that they cost at this interval; None while not known."""
        if self.snapshot_s is None or self.iteration_s is None:
            return None
        return self.snapshot_s / (self.interval * self.iteration_s)

    def state_dict(self) -> dict[str, Any]:
        """The figures of T, and d and C of the last snapshots; the budget is a flag and not among them."""
        return {"iteration_s": list(self._blocks), "snapshots": [list(snapshot) for snapshot in self._known()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`Interval.load_state_dict`; the first iterations after it are passed over again."""
        try:
            blocks = [_positive(seconds) for seconds in state["iteration_s"]]
            landed = [(int(iterations), float(cost)) for iterations, cost in state["snapshots"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no state of an interval tuner: {state!r}; start without it") from error
        self._blocks = deque(blocks, maxlen=BLOCKS)
        self._landed = deque(landed, maxlen=SNAPSHOTS)
        self._begin()


def _positive(seconds: float) -> float:
    if not seconds > 0:
        raise ValueError(f"{seconds} s is not positive")
    return float(seconds)


def interval_named(text: str, budget: float = 0.03) -> Interval:
    """The interval that a flag asks for: ``auto``, or a number of iterations.

    Raises:
        ValueError: it is neither, or not a number that is possible.
    """
    if text == "auto":
        return IntervalTuner(budget)
    if not text.isdecimal():
        raise ValueError(f"an interval is auto or a number of iterations, not {text}")
    return Every(int(text))
