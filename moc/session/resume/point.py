"""The point where a run resumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moc.policy import SnapshotPlan
from moc.recovery.sources import AvailableCheckpoint
from moc.session.resume.survivors import StartedSnapshot
from moc.state.record import Position, StepRecord


class NoRecoveryPoint(Exception):
    """There is no snapshot, and this worker's model has been trained since it was built: build it again."""


@dataclass(frozen=True)
class ResumePoint:
    """What a run resumes from.

    Attributes:
        position: where it resumes.
        record: of the iteration that led there, if known.
        newest: iteration of the newest recovery path, in memory or in storage; None if there is none.
        in_memory: iterations of the snapshots that stay in memory: those of that path if it is there, and those of the
            current window.
        experts: iterations of other snapshots in memory with experts that are still of use.
        newer: like ``experts``, of an abandoned time line; they are moved aside for the snapshots of this one.
        before: like ``newer``, but moved aside already.
        again: the snapshot of this position, if it had been started and is lost.
        stored: checkpoints in storage up to this position; empty if storage has not answered.
        begun: by iteration, the started snapshots among ``in_memory``; their parts and copies may still be lost.
    """

    position: Position
    record: StepRecord | None = None
    newest: int | None = None
    in_memory: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    newer: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    again: SnapshotPlan | None = None
    stored: tuple[AvailableCheckpoint, ...] = ()
    begun: Mapping[int, StartedSnapshot] = field(default_factory=dict)
