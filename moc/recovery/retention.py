"""Which checkpoints are still of use: in storage as the run goes on, and where snapshots are safe when it begins."""

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
    """Removes what the newest ways to go on do not need, the oldest first.

    Checkpoints whose manifests cannot be read stay, and so do those that are newer than ``upto``, and those of a window
    that is not complete yet.

    Args:
        store: the checkpoints.
        operators: of the model.
        exact: as in :func:`moc.recovery.sources.recoveries`.
        keep: how many ways to go on are wanted.
        upto: iteration of the newest checkpoint of this run.
    """
    held = [one for one in in_storage(look(store)[0]) if one.iteration <= upto]
    kept = needed(held, operators, exact, keep)
    for one in held:
        if one.key not in kept:
            store.remove(one.iteration)


@dataclass(frozen=True)
class Staying:
    """What a run finds when it goes on.

    Attributes:
        newest: iteration of the newest way to go on; None if there is none.
        in_memory: iterations of the snapshots in memory that are of use, ascending: those of that way if it is in
            memory, and of the window under way.
        again: the snapshot of the window under way that is missing: the one of the iteration at which the run is, so
            that it can be taken again.
        goes_on: the window under way does; if not, another one begins.
    """

    newest: int | None = None
    in_memory: tuple[int, ...] = ()
    again: SnapshotPlan | None = None
    goes_on: bool = True


class Experts(NamedTuple):
    """Snapshots in memory that a run has taken experts from, and may have to again.

    Attributes:
        older: iterations of those that are no newer than where it is, but for those that stay anyway.
        newer: of those that are; their time line is given up, and this one will come by their iterations.
        before: of those that have made room for this one already.
    """

    older: tuple[int, ...] = ()
    newer: tuple[int, ...] = ()
    before: tuple[int, ...] = ()


def experts_staying(used: Iterable[AvailableCheckpoint], in_memory: Collection[int], iteration: int) -> Experts:
    """What a run that has come back by partial snapshots must keep until it has saved what follows.

    Args:
        used: the checkpoints that something came from.
        in_memory: iterations of the snapshots that stay.
        iteration: from which the run goes on.
    """
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
    under_way: Sequence[SnapshotPlan],
) -> Staying:
    """What stays when a run goes on; the same on all ranks.

    Args:
        held: the checkpoints that there are.
        operators: of the model.
        exact: as in :func:`moc.recovery.sources.recoveries`.
        tier: where a snapshot is safe, :data:`~moc.recovery.sources.MEMORY` or
            :data:`~moc.recovery.sources.STORAGE`.
        iteration: from which the run goes on.
        under_way: the plans of what the window of that iteration has so far, that iteration's the last; empty if
            nothing is known of it.
    """
    past = [one for one in held if one.iteration <= iteration]
    way = next(recoveries(past, operators, exact), None)
    newest = None if way is None else way.iteration
    kept: list[int] = []
    if way is not None and all(way.at(moment.iteration).tier == MEMORY for moment in way.moments):
        kept = [moment.iteration for moment in way.moments]
    if newest == iteration:
        return Staying(newest, tuple(kept))
    missing = [plan for plan in under_way if not any(one.has(plan.iteration, tier, plan.operators) for one in past)]
    if not under_way or missing not in ([], [under_way[-1]]):
        return Staying(newest, tuple(kept), goes_on=False)
    if tier == MEMORY:
        kept = sorted({*kept, *(plan.iteration for plan in under_way if plan not in missing)})
    return Staying(newest, tuple(kept), missing[0] if missing else None)
