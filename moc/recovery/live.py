"""Treats state that survivors keep as a checkpoint in an inexact recovery."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from moc.recovery.sources import LIVE, MASTER, MOMENTS, AvailableCheckpoint, RecoveryPath, ReplayPoint, recoveries
from moc.state.detail import Detail
from moc.state.operators import Operator

Pieces = Mapping[int, Mapping[str, str]]
"""By rank and operator, an ID of the rank's part: ranks with the same ID have the same elements."""


def live_states(live: Mapping[int, int], pieces: Pieces, policy: str) -> list[AvailableCheckpoint]:
    """Returns the operators that survivors have completely, by iteration of their state.

    Args:
        live: by rank, the iteration of its state.
        pieces: of all ranks, new workers included.
        policy: name of the policy in force.
    """
    found = []
    for iteration in sorted(set(live.values())):
        held = {one for rank, at in live.items() if at == iteration for one in pieces[rank].items()}
        lacking = {name for of_rank in pieces.values() for name, piece in of_rank.items() if (name, piece) not in held}
        whole = {name: Detail.FULL.value for name, _ in sorted(held) if name not in lacking}
        if whole:
            found.append(AvailableCheckpoint(iteration, LIVE, whole, policy))
    return found


def path_of_survivors(iteration: int, operators: Sequence[Operator]) -> RecoveryPath:
    """Returns the path of a run whose survivors have the complete state of an iteration; it loads nothing."""
    state = AvailableCheckpoint(iteration, LIVE, {one.name: Detail.FULL.value for one in operators})
    sources = {(one.name, part): state for one in operators for part in (MASTER, MOMENTS)}
    return RecoveryPath((ReplayPoint(iteration, sources),))


def kept_of(way: RecoveryPath) -> dict[str, int]:
    """Returns the operators that survivors keep on a recovery path, with the iteration of their state."""
    return {name: held.iteration for (name, _), held in way.sources.items() if held.tier == LIVE}


def still_needed(
    way: RecoveryPath, held: Iterable[AvailableCheckpoint], operators: Sequence[Operator]
) -> list[AvailableCheckpoint]:
    """Returns the checkpoints in use, and those that would replace survivor state after another loss."""
    used = {one.key: one for one in way.used() if one.tier != LIVE}
    if kept_of(way):
        past = [one for one in held if one.iteration <= way.iteration]
        behind = next(recoveries(past, operators, exact=False), None)
        used |= {} if behind is None else {one.key: one for one in behind.used()}
    return list(used.values())


def given(way: RecoveryPath, live: Mapping[int, int], pieces: Pieces) -> list[tuple[str, int, int]]:
    """Returns copies of survivor state to ranks that lack it: operator, source and target."""
    kept, busy, found = kept_of(way), Counter(), []
    for target, of_rank in sorted(pieces.items()):
        for name, piece in of_rank.items():
            if name in kept and live.get(target) != kept[name]:
                holders = [rank for rank, at in live.items() if at == kept[name] and pieces[rank].get(name) == piece]
                source = min(holders, key=lambda rank: (busy[rank], rank))
                busy[source] += 1
                found.append((name, source, target))
    return found


def whole_ranks(way: RecoveryPath, live: Mapping[int, int], pieces: Pieces) -> frozenset[int]:
    """Returns the ranks that keep all their state at the path's iteration."""
    kept = kept_of(way)
    there = [rank for rank, at in live.items() if kept and at == way.iteration]
    return frozenset(rank for rank in there if all(kept.get(name) == way.iteration for name in pieces[rank]))
