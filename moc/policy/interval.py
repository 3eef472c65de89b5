"""Decides when snapshots are due, from measurements of the run.

A snapshot is due every N iterations, or as often as an overhead budget allows. :class:`Measurements` are also the input
of ``--ckpt-policy auto``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, median_high
from typing import Any

from moc.files import decode
from moc.policy.errors import PolicyError

WARM_UP = 5
"""Iterations at the start that are excluded from measurements: they allocate, compile and connect."""

BLOCK = 10
"""Undisturbed iterations averaged into one figure, and the spacing of the first snapshots."""

PROFILE_BLOCKS = 3
"""Figures required before the first snapshot."""

BLOCKS = 5
"""Number of recent figures whose median is used."""

SNAPSHOTS = 3
"""Number of recent snapshots whose median is used, and of snapshots taken before an interval is chosen."""

REFRESH = 200
"""Iterations without a new undisturbed figure after which the next snapshot waits for one."""


@dataclass(frozen=True)
class Transfer:
    """Bytes moved between two places, and the seconds needed, as means over ranks."""

    bytes: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class ObservedIteration:
    """Measurements of one iteration.

    All values are identical on every rank, such as means from the commit all-reduce. They exclude the time of
    evaluation, logging and dense ``--save`` checkpoints.

    Attributes:
        iteration_s: seconds of the iteration, including ``stall_s``.
        stall_s: seconds that training stalled on snapshots.
        started: a snapshot was started in this iteration.
        busy: on some rank, a snapshot is not persisted yet.
        forward_backward_s: seconds before the update, which a snapshot can overlap.
        bubble_s: seconds that a worker waited for other pipeline stages; 0 if not timed.
        gradients_s: delay of training, in seconds, by the gradients of a snapshot that all ranks have copied now; 0
            without gradients.
        copied: snapshots newly known to be copied by all ranks.
        written: snapshots newly known to be written to storage.
        replicated: snapshots newly known to be replicated to other nodes; means over nodes.
    """

    iteration_s: float
    stall_s: float = 0.0
    snapshot_started: bool = False
    snapshot_pending: bool = False
    forward_backward_s: float = 0.0
    copied: Transfer = Transfer()
    written: Transfer = Transfer()
    replicated: Transfer = Transfer()
    bubble_s: float = 0.0
    gradients_s: float = 0.0


class Interval(ABC):
    """Decides when a snapshot is due; identical on every rank that receives the same observations."""

    @abstractmethod
    def is_due(self, iteration: int) -> bool:
        """Returns whether a snapshot is to be taken after ``iteration`` iterations; changes no state."""

    @property
    def iterations(self) -> int:
        """Iterations between snapshots, if known; by default 1."""
        return 1

    def observe(self, observed: ObservedIteration) -> None:  # noqa: B027
        """Records one iteration; called once per iteration, before :meth:`is_due`."""

    def limit_window_length(self, length: int) -> None:  # noqa: B027
        """Limits future windows to ``length`` snapshots, if their length is measured."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the measurements as JSON-compatible values; stored with each checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the measurements, as if a snapshot had just been persisted.

        Called with the same state on all ranks: after a restart, and also by survivors when a rank was replaced.

        Raises:
            ValueError: as :meth:`loading`.
        """
        self.loading(state)()

    def loading(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Decodes a :meth:`state_dict`, and changes nothing; returns the function that restores it.

        The state may belong to another kind of interval: the common fields are used.

        Raises:
            ValueError: a field of the state is invalid.
        """
        return _restore_nothing


def _restore_nothing() -> None:
    """Restores nothing: the interval has no state."""


@dataclass(frozen=True)
class Every(Interval):
    """A snapshot every ``interval`` iterations, regardless of its cost.

    Raises:
        ValueError: ``interval`` is below 1.
    """

    interval: int

    def __post_init__(self):
        if self.interval < 1:
            raise PolicyError(
                f"a snapshot every {self.interval} iterations is not possible. Fix: set an interval of 1 or more",
                code="interval-invalid",
            )

    @property
    def iterations(self) -> int:
        return self.interval

    def is_due(self, iteration: int) -> bool:
        """Returns whether the iteration is a positive multiple of the interval."""
        return iteration > 0 and iteration % self.interval == 0


@dataclass
class _PendingSnapshot:
    """Costs of the last snapshot since its start."""

    iterations: int = 0
    seconds: float = 0.0
    stall_s: float = 0.0

    def cost(self, iteration_s: float) -> float:
        """Returns the seconds that training lost to stalls and to slower iterations during the snapshot."""
        return self.stall_s + max(0.0, self.seconds - self.iterations * iteration_s)


@dataclass(frozen=True)
class _Stored:
    """The state of an interval tuner."""

    iteration_s: tuple[decode.Positive, ...] = ()
    snapshots: tuple[tuple[decode.Count, decode.Seconds], ...] = ()


class IntervalTuner(Interval):
    """Shortest interval whose snapshots cost no more than a budget.

    Rules of CheckFreq (Mohan, Phanishayee, Chidambaram, FAST 2021):

    * A snapshot starts only when the previous one is persisted.
    * Snapshots cost at most a share ``budget`` of training time.
    * Costs are measured during training, first to choose an interval and then to adapt it.

    MoEvement gives CheckFreq 3 % (section 5.2) and reports intervals of 57 to 124 iterations for its models (Table 3).

    The first ``WARM_UP`` iterations are skipped and ``PROFILE_BLOCKS * BLOCK`` are measured without a snapshot.
    ``SNAPSHOTS`` snapshots follow, each with about ``BLOCK`` undisturbed iterations after it. From then on::

        T = median over the last BLOCKS of the mean of BLOCK undisturbed iterations                          [seconds]
        d = iterations from the start of a snapshot until it is known to be persisted
        C = stalls + max(0, time of these d iterations without the stalls - d T)            [seconds that one costs]
        interval = max(1, median of d, ceil(median of C / (budget T)))          medians over the last SNAPSHOTS ones

    The interval is recomputed after every snapshot: it grows when snapshots cost more or iterations become shorter, and
    shrinks in the opposite cases. Means absorb bursts of slowdown; medians ignore a single slow mean or snapshot. A
    lasting change in cost takes effect with the second snapshot that shows it, a change of T when most of the
    ``BLOCKS`` show it. If snapshots disturb all iterations, one snapshot in ``REFRESH`` iterations waits for ``BLOCK``
    undisturbed ones, to update T.

    CheckFreq's published implementation differs:

    * It stops training to profile trial snapshots. Here ordinary snapshots are measured.
    * Its first interval follows only from the time to persist.
    * It measures on rank 0, and never shortens the interval.
    * It adds two iterations whenever the time between checkpoints exceeds the budget.
    * It also chooses between snapshots in GPU memory and in host memory, which is not decided here.

    Args:
        budget: cost of snapshots as a share of the time without them, such as 0.03 for 3 %.

    Raises:
        ValueError: the budget is not a positive number.
    """

    def __init__(self, budget: float = 0.03):
        if not (math.isfinite(budget) and budget > 0):
            raise PolicyError(
                f"an overhead budget of {budget} is not possible. Fix: take a fraction above 0, such as 0.03",
                code="value-out-of-range",
            )
        self.budget = budget
        self._blocks: deque[float] = deque(maxlen=BLOCKS)
        self._completed: deque[tuple[int, float]] = deque(maxlen=SNAPSHOTS)
        self._reset_progress()

    def _reset_progress(self) -> None:
        """Resets everything in progress."""
        self._warm_up_count = 0
        self._block: list[float] = []
        self._pending: _PendingSnapshot | None = None
        self._is_pending, self._since_start, self._since_block = False, 0, 0

    def observe(self, observed: ObservedIteration) -> None:
        """As :meth:`Interval.observe`.

        Raises:
            ValueError: a time is not a number, no time has passed, or the stall is negative.
        """
        iteration_s, stall_s = observed.iteration_s, observed.stall_s
        if not (math.isfinite(iteration_s) and math.isfinite(stall_s) and iteration_s > 0 and stall_s >= 0):
            raise PolicyError(
                f"an iteration of {iteration_s} s with a stall of {stall_s} s cannot have been measured. Fix: report "
                "the seconds of an iteration and of its stall as measured",
                code="value-out-of-range",
            )
        disturbed = observed.snapshot_started or observed.snapshot_pending or self._is_pending
        if observed.snapshot_started:
            if self._pending and not self._is_pending:
                self._completed.append(self._cost_of(self._pending))
            self._pending, self._since_start = _PendingSnapshot(), 0
        self._is_pending = observed.snapshot_pending
        self._since_start += 1
        self._since_block += 1
        if self._warm_up_count < WARM_UP:
            self._warm_up_count += 1
            self._pending = None
        elif not disturbed and not stall_s:
            self._add_undisturbed(observed)
        elif self._pending:  # None after the skipped iterations: the cost of their snapshots is only partly known
            self._pending.stall_s += stall_s
            self._pending.iterations += disturbed
            self._pending.seconds += max(0.0, iteration_s - stall_s) if disturbed else 0.0

    def _add_undisturbed(self, observed: ObservedIteration) -> None:
        self._block.append(observed.iteration_s)
        if len(self._block) == BLOCK:
            self._blocks.append(math.fsum(self._block) / BLOCK)
            self._block, self._since_block = [], 0

    def _cost_of(self, pending: _PendingSnapshot) -> tuple[int, float]:
        iteration_s = self.iteration_s
        return pending.iterations, pending.stall_s if iteration_s is None else pending.cost(iteration_s)

    def _snapshot_costs(self) -> list[tuple[int, float]]:
        """Returns the iterations and lost seconds of the last persisted snapshots."""
        newest = [self._cost_of(self._pending)] if self._pending and not self._is_pending else []
        return [*self._completed, *newest][-SNAPSHOTS:]

    def is_due(self, iteration: int) -> bool:
        """Returns whether the last snapshot is persisted and began at least an interval ago; ignores ``iteration``."""
        if self._is_pending or len(self._blocks) < PROFILE_BLOCKS:
            return False
        if not self.is_settled:
            return self._since_block < self._since_start
        return self._since_start >= self.interval and self._since_block < REFRESH

    @property
    def is_settled(self) -> bool:
        """Whether enough has been measured to choose an interval."""
        return len(self._blocks) >= PROFILE_BLOCKS and len(self._snapshot_costs()) >= SNAPSHOTS

    @property
    def iterations(self) -> int:
        return self.interval

    @property
    def interval(self) -> int:
        """Iterations between snapshots, at least 1; provisional until :attr:`is_settled`."""
        costs, iteration_s = self._snapshot_costs(), self.iteration_s
        if not costs or iteration_s is None:
            return BLOCK
        affordable = math.ceil(median(cost for _, cost in costs) / (self.budget * iteration_s))
        return max(1, median_high(iterations for iterations, _ in costs), affordable)

    @property
    def iteration_s(self) -> float | None:
        """Seconds of an undisturbed iteration; None until measured."""
        return median(self._blocks) if self._blocks else None

    @property
    def snapshot_s(self) -> float | None:
        """Seconds that training loses per snapshot; None until measured."""
        costs = self._snapshot_costs()
        return median(cost for _, cost in costs) if costs else None

    @property
    def overhead(self) -> float | None:
        """Cost of snapshots at this interval as a share of the time without them; None until measured."""
        snapshot_s, iteration_s = self.snapshot_s, self.iteration_s
        return None if snapshot_s is None or iteration_s is None else snapshot_s / (self.interval * iteration_s)

    def state_dict(self) -> dict[str, Any]:
        """Returns the means of T, and d and C of the last snapshots; without the budget, which is a flag."""
        return {"iteration_s": list(self._blocks), "snapshots": [list(snapshot) for snapshot in self._snapshot_costs()]}

    def loading(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """As :meth:`Interval.loading`; the tuner then skips the first iterations again."""
        stored = decode.convert_state(state, _Stored, "an interval tuner")

        def load() -> None:
            self._blocks = deque(stored.iteration_s, maxlen=BLOCKS)
            self._completed = deque(stored.snapshots, maxlen=SNAPSHOTS)
            self._reset_progress()

        return load


def parse_interval(text: str, budget: float = 0.03) -> Interval:
    """Returns the interval of a flag value: ``auto`` or a number of iterations.

    Raises:
        ValueError: the value is neither, or the number is below 1.
    """
    if text == "auto":
        return IntervalTuner(budget)
    if not text.isdecimal():
        raise PolicyError(
            f"{text!r} is not an interval in iterations. Fix: set auto or an integer",
            code="interval-invalid",
        )
    return Every(int(text))


UNDISTURBED_MTBF_S = 86400.0
"""Prior mean time between failures in seconds: as if the run had already seen one fault in that time."""

_TRANSFERS = ("copied", "written", "replicated")


class Measurements:
    """Medians of recent measurements; identical on every rank that receives the same observations.

    The first ``WARM_UP`` iterations after each start are skipped. Iteration times exclude stalls but include the
    slowdown by snapshots: with a snapshot in every iteration, all are disturbed.

    Args:
        trained_s: seconds of all iterations since the job began.
        faults: faults that the job has seen.
    """

    def __init__(self, trained_s: float = 0.0, faults: int = 0):
        self.trained_s, self.faults = trained_s, faults
        self._warm_up_count = 0
        self._iteration_s: deque[float] = deque(maxlen=BLOCK * BLOCKS)
        self._forward_backward_s: deque[float] = deque(maxlen=BLOCK * BLOCKS)
        self._bubble_s: deque[float] = deque(maxlen=BLOCK * BLOCKS)
        self._gradients_s: deque[float] = deque(maxlen=BLOCK)
        self._transfers: dict[str, deque[Transfer]] = {name: deque(maxlen=BLOCK) for name in _TRANSFERS}

    def observe(self, observed: ObservedIteration) -> None:
        """Records the measurements of one iteration."""
        self.trained_s += observed.iteration_s
        for name, transfers in self._transfers.items():
            transfer = getattr(observed, name)
            if transfer.bytes and transfer.seconds:
                transfers.append(transfer)
        if observed.gradients_s > 0:
            self._gradients_s.append(observed.gradients_s)
        self._warm_up_count += 1
        if self._warm_up_count <= WARM_UP:
            return
        self._iteration_s.append(max(0.0, observed.iteration_s - observed.stall_s))
        if observed.forward_backward_s > 0:
            self._forward_backward_s.append(observed.forward_backward_s)
        if observed.bubble_s > 0:
            self._bubble_s.append(observed.bubble_s)

    @property
    def medians(self) -> dict[str, float]:
        """The figures known so far, by name.

        ``iteration_s``, ``forward_backward_s`` and ``bubble_s`` are in seconds. Rates are in bytes per second:

        * ``copy_rate``: of a rank to host memory,
        * ``write_rate``: of a rank to storage while all write,
        * ``replicate_rate``: of a node from others.
        """
        rates = zip(("copy_rate", "write_rate", "replicate_rate"), self._transfers.values(), strict=True)
        medians = {
            name: median(transfer.bytes / transfer.seconds for transfer in transfers)
            for name, transfers in rates
            if transfers
        }
        if len(self._forward_backward_s) >= BLOCK:
            medians["iteration_s"] = median(self._iteration_s)
            medians["forward_backward_s"] = min(medians["iteration_s"], median(self._forward_backward_s))
        if len(self._bubble_s) >= BLOCK:
            medians["bubble_s"] = median(self._bubble_s)
        return medians

    @property
    def gradients_s(self) -> float:
        """Median delay of training by the gradients of a snapshot, in seconds; 0 until measured."""
        return median(self._gradients_s) if len(self._gradients_s) == BLOCK else 0.0

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of the job in seconds, estimated from the faults so far."""
        return (UNDISTURBED_MTBF_S + self.trained_s) / (1 + self.faults)

    def state_dict(self) -> dict[str, Any]:
        """Returns all measurements as JSON-compatible values."""
        transfers = {
            name: [[transfer.bytes, transfer.seconds] for transfer in transfers]
            for name, transfers in self._transfers.items()
        }
        times = {"iteration_s": list(self._iteration_s), "forward_backward_s": list(self._forward_backward_s)}
        times |= {"bubble_s": list(self._bubble_s)} if self._bubble_s else {}
        times |= {"gradients_s": list(self._gradients_s)} if self._gradients_s else {}
        return {"trained_s": self.trained_s, "faults": self.faults} | times | transfers

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Measurements:
        """Restores a :meth:`state_dict`; the first iterations are skipped again.

        Raises:
            ValueError: the state is not from :meth:`state_dict`.
        """
        stored = decode.convert_state(state, _StoredMeasurements, "the measurements of a run")
        measured = cls(stored.trained_s, stored.faults)
        measured._iteration_s.extend(stored.iteration_s)
        measured._forward_backward_s.extend(stored.forward_backward_s)
        measured._bubble_s.extend(stored.bubble_s)
        measured._gradients_s.extend(stored.gradients_s)
        for name, transfers in measured._transfers.items():
            transfers.extend(Transfer(amount, seconds) for amount, seconds in getattr(stored, name))
        return measured


_Transfers = tuple[tuple[decode.Positive, decode.Positive], ...]


@dataclass(frozen=True)
class _StoredMeasurements:
    """State of measurements: seconds, and bytes and seconds of each transfer."""

    trained_s: decode.Seconds
    faults: decode.Count
    iteration_s: tuple[decode.Seconds, ...]
    forward_backward_s: tuple[decode.Positive, ...]
    copied: _Transfers
    written: _Transfers
    replicated: _Transfers
    bubble_s: tuple[decode.Positive, ...] = ()
    gradients_s: tuple[decode.Positive, ...] = ()
