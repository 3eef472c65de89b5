"""How a pipeline stage goes on with a replay that the loss of another stage has cut off (MoEvement, Appendix A)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from moc.recovery.scope import Logs, Replayed
from moc.recovery.sources import AvailableCheckpoint, RecoveryPath, ReplayPoint, window_replay
from moc.state.operators import Operator


@dataclass(frozen=True)
class Course:
    """How the workers of a stage arrive at an iteration by themselves.

    Attributes:
        begin: iterations completed where it begins.
        way: the checkpoints that they load on it; None if they have all of their state already.
        goes_on: they have the state of ``begin``, but for operators that are still to be loaded.
        behind: ranks that have it when they have completed the iteration of ``begin``, of which they have the reduced
            gradients.
    """

    begin: int
    way: RecoveryPath | None
    goes_on: bool = False
    behind: frozenset[int] = frozenset()

    @property
    def whole(self) -> int:
        """From this iteration on all of their operators learn."""
        return self.begin if self.way is None else self.way.iteration

    def moment(self, iteration: int) -> ReplayPoint | None:
        """What they load where they have completed so many iterations, if anything."""
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
    """How a stage goes on from where it is.

    Whoever has completed an iteration knows that all of its stage have the reduced gradients of it (see
    ``moc/session/resume/replay.py``), so its workers are one iteration apart at the most.

    Args:
        stage: which.
        until: iterations completed where it is to arrive.
        live: by rank the iteration of the state that its worker has.
        pieces: by rank, the operators of which it holds something.
        logs: how far each worker had come with computing again; whether there are logs is not looked at.
        held: the checkpoints that there are.
        operators: of the model.

    Returns:
        None if one of its workers has no such state, or they are too far apart, or what it lacks is not there.
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
