"""Where a run resumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moc.policy import SnapshotPlan
from moc.session.resume.survivors import StartedSnapshot
from moc.state.record import Position, StepRecord


class NoRecoveryPoint(Exception):
    """There is no snapshot, and this worker's model has been trained since it was built: build it again."""


@dataclass(frozen=True)
class ResumePoint:
    """What a run resumes from.

    Attributes:
        position: from here.
        record: of the iteration that led to it, if it is known.
        newest: iteration of the newest way back, in memory or in storage; None if there is none.
        in_memory: iterations of the snapshots in memory that stay: those of that way if it is there, and those of the
            window under way.
        experts: others in memory, of which experts are still of use.
        newer: the same, of a time line that was given up; they make room for those of this one.
        before: the same, which have made room already.
        again: the snapshot of this position, if it was begun already and is lost.
        begun: by iteration what is known of those in memory; their parts and copies may be lost later.
    """

    position: Position
    record: StepRecord | None = None
    newest: int | None = None
    in_memory: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    newer: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    again: SnapshotPlan | None = None
    begun: Mapping[int, StartedSnapshot] = field(default_factory=dict)
