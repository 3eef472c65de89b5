"""Defines the point where a run resumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moc.policy import SnapshotPlan
from moc.recovery.sources import AvailableCheckpoint
from moc.session.resume.survivors import StartedSnapshot
from moc.state.record import Position, StepRecord


class NoRecoveryPoint(Exception):
    """Lack of a snapshot for a model that was trained since it was built, and must be built again."""


@dataclass(frozen=True)
class ResumePoint:
    """Point where a run resumes.

    Attributes:
        position: iterations and samples completed.
        record: step record of the last iteration, if known.
        newest: iteration of the newest recovery path, in memory or in storage; None if there is none.
        in_memory: iterations of the snapshots retained in memory: of that path if it is in memory, and of the current
            window.
        experts: iterations of other snapshots in memory with experts that are still needed.
        newer: like ``experts``, but superseded; they are moved to superseded memory, since the run repeats these
            snapshots.
        before: like ``newer``, but already in superseded memory.
        repeated_plan: plan of this position's snapshot, if it was started and is lost.
        stored: known checkpoints in storage up to this position.
        has_listed_storage: storage has been taken and listed to resume; otherwise this is due in the background.
        started_snapshots: by iteration, those among ``in_memory`` that were started; their parts and copies may still
            be lost.
    """

    position: Position
    record: StepRecord | None = None
    newest: int | None = None
    in_memory: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    newer: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    repeated_plan: SnapshotPlan | None = None
    stored: tuple[AvailableCheckpoint, ...] = ()
    has_listed_storage: bool = True
    started_snapshots: Mapping[int, StartedSnapshot] = field(default_factory=dict)
