"""Assigns nodes to parts of the model, if a copy of the model takes several nodes; pure functions.

A copy is cut into *parts* of one node each, such as pipeline stages.  A job trains with the complete copies that its
nodes form.  *Seats* (rank assignments) are numbered copy by copy: seat i has part i % parts.  The last seats belong to
*helpers* (partial-model nodes): surplus nodes of a part, with its state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A node that could train.

    Attributes:
        place: rank block of the node.
        part: part of the model for which its workers are initialized; None if it has no workers.
        trains: its workers have the state of that part.
    """

    place: int
    part: int | None = None
    trains: bool = False


def part_of(seat: int, seats: int, parts: int, helpers: Sequence[int]) -> int:
    """Returns the part of the model of a seat.

    Args:
        seat: number of the seat.
        seats: number of seats, with helpers.
        parts: nodes of a copy.
        helpers: parts of the last seats.
    """
    behind = seat - (seats - len(helpers))
    return helpers[behind] if helpers and behind >= 0 else seat % parts


def copies_at_once(candidates: Iterable[Candidate], parts: int) -> int:
    """Returns the number of model copies that nodes form without initializing workers."""
    built = [candidate.part for candidate in candidates]
    return min(built.count(part) for part in range(parts))


def seats(candidates: Iterable[Candidate], parts: int, copies: int) -> tuple[int, ...]:
    """Assigns seats: each node keeps its part, unless the part has more nodes than there are copies.

    Among surplus nodes of a part, those with its state have priority.  Remaining seats go to nodes without workers,
    then to nodes initialized for another part.

    Args:
        candidates: nodes, at least ``parts * copies``.
        parts: nodes of a copy.
        copies: number of copies.

    Returns:
        The place in each seat.
    """
    there, by_part = sorted(candidates, key=lambda one: one.place), []
    for part in range(parts):
        mine = [one for one in there if one.part == part]
        by_part.append(sorted(mine, key=lambda one: not one.trains)[:copies])
    seated = [one for of_part in by_part for one in of_part]
    others = iter(sorted((one for one in there if one not in seated), key=_reluctance))
    for copy in range(copies):
        for of_part in by_part:
            of_part += [next(others)] if len(of_part) <= copy else []
    in_order = [sorted(one.place for one in of_part) for of_part in by_part]
    return tuple(of_part[copy] for copy in range(copies) for of_part in in_order)


def helpers(
    candidates: Iterable[Candidate], parts: int, seated: Sequence[int], later: Sequence[int]
) -> tuple[Candidate, ...]:
    """Returns the partial-model nodes: they have state of a part, no seat in a copy, and no other part later.

    If two parts differ by two nodes or more, a node that changes its part forms another copy.  It does not help, and is
    free for initialization with the other part.

    Args:
        candidates: nodes.
        parts: nodes of a copy.
        seated: places in the current seats of copies.
        later: places in these seats when workers are initialized for the maximum number of copies.

    Returns:
        Helpers, sorted by part and place.
    """
    goes_to = {place: seat % parts for seat, place in enumerate(later)}
    free = (one for one in candidates if one.trains and one.part is not None and one.place not in seated)
    stay = (one for one in free if goes_to.get(one.place, one.part) == one.part)
    return tuple(sorted(stay, key=lambda one: (one.part, one.place)))


def _reluctance(one: Candidate) -> tuple[bool, bool, int]:
    return one.part is not None, one.trains, one.place
