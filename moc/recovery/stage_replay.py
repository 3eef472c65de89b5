"""Selects the pipeline stages that replay, and resumes an interrupted replay (MoEvement, Appendix A).

Chooses the fewest pipeline stages, and the shortest replay, that upstream logs allow after a loss. MoEvement, section
3.4 and Appendix A: the stages of lost workers replay, and logs provide the data that other stages sent them. Adjacent
stages that replay an iteration together recompute the data between them, so they need no log of it. Separate stages
are independent. A stage whose replay was interrupted by another loss continues from its progress.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moc.recovery.sources import AvailableCheckpoint, RecoveryPath, ReplayPoint, window_replay
from moc.state.operators import Operator


@dataclass(frozen=True)
class InterruptedReplay:
    """Progress of a worker's interrupted replay.

    Attributes:
        iteration: of its state.
        frozen: operators behind this iteration, since they had not been loaded in full before it.
        reduced: it also has the reduced gradients of the next iteration.
    """

    iteration: int
    frozen: frozenset[str] = frozenset()
    reduced: bool = False


@dataclass(frozen=True)
class Logs:
    """Available upstream logs, and the progress of replays.

    Attributes:
        stages: by rank, its pipeline stage.
        feeds: by stage, the stages that it receives from.
        kept: by rank, the iterations with a complete log, counted from 1.
        reduced: by rank, the iteration whose reduced gradients it has; absent if there is none.
        records: iterations whose step record is known.
        replayed: by rank, the progress of its interrupted replay, if any.
    """

    stages: Mapping[int, int]
    feeds: Mapping[int, Collection[int]]
    kept: Mapping[int, Collection[int]]
    reduced: Mapping[int, int] = field(default_factory=dict)
    records: Collection[int] = frozenset()
    replayed: Mapping[int, InterruptedReplay] = field(default_factory=dict)

    def of(self, stage: int) -> list[int]:
        """Returns the ranks of a stage."""
        return [rank for rank, other in self.stages.items() if other == stage]

    def have(self, stage: int, iterations: Iterable[int]) -> bool:
        """Returns whether a stage has its logs of iterations."""
        wanted = set(iterations)
        return all(wanted <= set(self.kept.get(rank, ())) for rank in self.of(stage))


def scope(
    lost: Collection[int], since: int, until: int, logs: Logs, ahead: Mapping[int, int] | None = None
) -> dict[int, int] | None:
    """Returns the stages that replay up to the iteration of the others, with the iteration where each starts.

    These are the lost stages, and stages without logs that others need. A stage that is ahead starts from its progress;
    it serves its logs for earlier iterations, like the stages that keep their state.

    Args:
        lost: stages with a worker that lacks its state.
        since: iterations completed at the checkpoint that they return to.
        until: iterations completed by the other stages.
        logs: that are available.
        ahead: by stage, iterations completed in an interrupted replay; after ``since``.

    Returns:
        None if all stages would replay, and none would keep its state.
    """
    begins = dict.fromkeys(lost, since) | dict(ahead or {})

    def serves(feed: int, begin: int) -> bool:
        """Returns whether a stage can serve another's replay from ``begin`` on, until it replays itself."""
        return logs.have(feed, range(begin + 1, begins.get(feed, until) + 1))

    while joins := {feed for stage, begin in begins.items() for feed in logs.feeds[stage] if not serves(feed, begin)}:
        begins |= dict.fromkeys(joins, since)
    return begins if len(begins) < len(logs.feeds) else None


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
        """First iteration that updates all operators of the stage."""
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
    """Returns the plan of a stage that continues from its current state to the iteration ``until``.

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


def _state(rank: int, live: Mapping[int, int], logs: Logs) -> InterruptedReplay | None:
    if rank in live:
        return InterruptedReplay(live[rank], reduced=logs.reduced.get(rank) == live[rank] + 1)
    return logs.replayed.get(rank)


def _way(lacking: Sequence[Operator], begin: int, held: Iterable[AvailableCheckpoint]) -> RecoveryPath | None:
    if not lacking:
        return None
    there: dict[int, list[AvailableCheckpoint]] = defaultdict(list)
    for one in sorted(held, key=lambda one: one.tier):  # memory before storage
        there[one.iteration].append(one)
    return window_replay(there, lacking, begin)
