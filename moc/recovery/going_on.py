"""Resumes a pipeline stage's replay after the loss of another stage interrupted it (MoEvement, Appendix A)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from moc.recovery.scope import Logs, Replayed
from moc.recovery.sources import AvailableCheckpoint, RecoveryPath, ReplayPoint, window_replay
from moc.state.operators import Operator


@dataclass(frozen=True)
class Course:
    """Stage plan: how the workers of a stage reach an iteration independently.

    Attributes:
        begin: iterations completed at its start.
        way: recovery path to load; None if the stage already has its full state.
        goes_on: workers have the state of ``begin``, except for operators still to be loaded.
        behind: ranks one iteration behind ``begin`` that have its reduced gradients: they complete it first.
    """

    begin: int
    way: RecoveryPath | None
    goes_on: bool = False
    behind: frozenset[int] = frozenset()

    @property
    def whole(self) -> int:
        """First iteration at which all operators of the stage learn."""
        return self.begin if self.way is None else self.way.iteration

    def moment(self, iteration: int) -> ReplayPoint | None:
        """Returns the data to load at this many completed iterations, if any."""
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
    """Returns the plan by which a stage continues from its current state to the iteration ``until``.

    A worker completes an iteration only when its stage has all reduced gradients (``moc/session/resume/replay.py``). So
    workers of a stage are at most one iteration apart. The availability of logs is not checked.

    Args:
        stage: number of the stage.
        until: iteration to reach.
        live: by rank, the iteration of its state.
        pieces: by rank, the operators that it has a part of.
        logs: upstream logs and the progress of replays.
        held: available checkpoints.
        operators: of the model.

    Returns:
        None if a worker of the stage has no usable state, the workers are too far apart, or state that the stage lacks
        is unavailable.
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
