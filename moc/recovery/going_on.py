"""Continues a pipeline stage's replay that the loss of another stage interrupted (MoEvement, Appendix A)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from moc.recovery.scope import Logs, Replayed
from moc.recovery.sources import AvailableCheckpoint, RecoveryPath, ReplayPoint, window_replay
from moc.state.operators import Operator


@dataclass(frozen=True)
class Course:
    """How the workers of a stage reach an iteration by themselves.

    Attributes:
        begin: iterations completed where it starts.
        way: checkpoints loaded on it; None if the stage already has its whole state.
        goes_on: workers have the state of ``begin``, except for operators still to be loaded.
        behind: ranks one iteration behind ``begin``, whose reduced gradients they have: they complete it first.
    """

    begin: int
    way: RecoveryPath | None
    goes_on: bool = False
    behind: frozenset[int] = frozenset()

    @property
    def whole(self) -> int:
        """Iteration from which on all operators of the stage learn."""
        return self.begin if self.way is None else self.way.iteration

    def moment(self, iteration: int) -> ReplayPoint | None:
        """Returns what to load at this many completed iterations, if anything."""
        return None if self.way is None else self.way.moment(iteration)


def goes_on(
    stage: int,
    until: int,
    live: Mapping[int, int],
    pieces: Mapping[int, Collection[str]],
    logs: Logs,
    held: Iterable[AvailableCheckpoint],
    operators: Sequence[Operator],
) -> Course | None:
    """Returns the course by which a stage continues from its current state to the iteration ``until``.

    A worker completes an iteration only when its whole stage has the reduced gradients (see
    ``moc/session/resume/replay.py``), so workers of a stage are at most one iteration apart.  ``live`` has by rank the
    iteration of its state, ``pieces`` the operators of which it holds something.  Availability of logs is not checked.

    Returns:
        None if a worker of the stage has no such state, they are too far apart, or what the stage lacks is not
        available.
    """
    ranks = logs.of(stage)
    states = {rank: state for rank in ranks if (state := _state(rank, live, logs)) is not None}
    begin = max((state.iteration for state in states.values()), default=until)
    arrived = {rank for rank, state in states.items() if state.iteration == begin}
    behind = {rank for rank, state in states.items() if state.iteration == begin - 1 and state.reduced}
    if arrived | behind != set(ranks) or begin > until:
        return None
    frozen = set().union(*(states[rank].frozen for rank in arrived)) & set().union(*(pieces[rank] for rank in ranks))
    lacking = [operator for operator in operators if operator.name in frozen]
    course = Course(begin, _way(lacking, begin, held), goes_on=True, behind=frozenset(behind))
    if (lacking and course.way is None) or course.whole > until:
        return None
    recorded = {*range(course.whole + 1, until + 1), *([begin] if behind else [])}
    return course if recorded <= set(logs.records) else None


def _state(rank: int, live: Mapping[int, int], logs: Logs) -> Replayed | None:
    if rank in live:
        return Replayed(live[rank], reduced=logs.reduced.get(rank) == live[rank] + 1)
    return logs.replayed.get(rank)


def _way(lacking: Sequence[Operator], begin: int, held: Iterable[AvailableCheckpoint]) -> RecoveryPath | None:
    if not lacking:
        return None
    there: dict[int, list[AvailableCheckpoint]] = defaultdict(list)
    for one in sorted(held, key=lambda one: one.tier):  # memory before storage
        there[one.iteration].append(one)
    return window_replay(there, lacking, begin)
