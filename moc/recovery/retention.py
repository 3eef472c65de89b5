"""Selects the checkpoints to retain: in storage during a run, and in the snapshots' tier when it resumes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moc.policy import SnapshotPlan
from moc.recovery.inventory import in_storage, look
from moc.recovery.sources import BEFORE, MEMORY, AvailableCheckpoint, needed, recoveries
from moc.state.operators import Operator
from moc.store.store import Store


def retain(store: Store, operators: Sequence[Operator], exact: bool, keep: int, upto: int) -> None:
    """Removes checkpoints that the newest ``keep`` recovery paths do not need, the oldest first.

    Checkpoints with unreadable manifests stay. So do checkpoints newer than ``upto``, the newest of this run, and
    checkpoints of an incomplete window.
    """
    held = [one for one in in_storage(look(store)[0]) if one.iteration <= upto]
    kept = needed(held, operators, exact, keep)
    for one in held:
        if one.key not in kept:
            store.remove(one.iteration)


@dataclass(frozen=True)
class Staying:
    """Checkpoints that a resuming run keeps.

    Attributes:
        newest: iteration of the newest recovery path; None if there is none.
        in_memory: iterations of the needed snapshots in memory, ascending: of the newest path if it is in memory, and
            of the current window.
        again: the missing snapshot of the current window, if only that of the resumed iteration is missing: it can be
            taken again.
        goes_on: the current window continues; otherwise another one starts.
    """

    newest: int | None = None
    in_memory: tuple[int, ...] = ()
    again: SnapshotPlan | None = None
    goes_on: bool = True


class Experts(NamedTuple):
    """Snapshots in memory that a run has taken experts from, and may need again.

    Attributes:
        older: iterations up to the resumed one, except snapshots that stay anyway.
        newer: iterations after the resumed one; the run will take these snapshots again.
        before: iterations of snapshots that were already moved to superseded memory.
    """

    older: tuple[int, ...] = ()
    newer: tuple[int, ...] = ()
    before: tuple[int, ...] = ()


def experts_staying(used: Iterable[AvailableCheckpoint], in_memory: Collection[int], iteration: int) -> Experts:
    """Returns the snapshots whose experts a run must keep after an inexact recovery, until newer ones are durable."""
    used = sorted(used, key=lambda one: one.iteration)
    others = [one.iteration for one in used if one.tier == MEMORY and one.iteration not in in_memory]
    return Experts(
        tuple(other for other in others if other <= iteration),
        tuple(other for other in others if other > iteration),
        tuple(one.iteration for one in used if one.tier == BEFORE),
    )


def staying(
    held: Collection[AvailableCheckpoint],
    operators: Sequence[Operator],
    exact: bool,
    tier: str,
    iteration: int,
    window: Sequence[SnapshotPlan],
) -> Staying:
    """Returns the checkpoints that stay when a run resumes from an iteration; identical on all ranks.

    Args:
        held: available checkpoints.
        operators: of the model.
        exact: as in :func:`moc.recovery.sources.recoveries`.
        tier: where a snapshot is durable, :data:`~moc.recovery.sources.MEMORY` or
            :data:`~moc.recovery.sources.STORAGE`.
        iteration: that the run resumes from.
        window: plans of the current window up to and including that iteration; empty if unknown.
    """
    past = [one for one in held if one.iteration <= iteration]
    way = next(recoveries(past, operators, exact), None)
    newest = None if way is None else way.iteration
    kept: list[int] = []
    if way is not None:
        of_path = way.used() if exact else [way.at(moment.iteration) for moment in way.moments]
        if all(one.tier == MEMORY for one in of_path):
            kept = sorted({one.iteration for one in of_path})
    if newest == iteration:
        return Staying(newest, tuple(kept))
    missing = [plan for plan in window if not any(one.has(plan.iteration, tier, plan.operators) for one in past)]
    if not window or missing not in ([], [window[-1]]):
        return Staying(newest, tuple(kept), goes_on=False)
    if tier == MEMORY:
        kept = sorted({*kept, *(plan.iteration for plan in window if plan not in missing)})
    return Staying(newest, tuple(kept), missing[0] if missing else None)
