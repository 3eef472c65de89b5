"""Which nodes train, and which part of the model each has, where a copy of the model takes several nodes; pure.

A copy is cut into *parts* of one node each, such as pipeline stages.  A job trains with the whole copies that its nodes
make.  Seats are numbered copy by copy: seat i has part i % parts.  Behind the last whole copy come the seats of
*helpers*: nodes that have a part of which there are more than copies, and its state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A node that could train.

    Attributes:
        place: in the job.
        part: of the model that its workers are built for; None if it has no workers.
        trains: its workers have the state of that part.
    """

    place: int
    part: int | None = None
    trains: bool = False


def part_of(seat: int, seats: int, parts: int, helpers: Sequence[int]) -> int:
    """The part of the model that a seat has.

    Args:
        seat: its number.
        seats: of whole copies and helpers.
        parts: nodes of a copy.
        helpers: the part of each of the last seats.
    """
    behind = seat - (seats - len(helpers))
    return helpers[behind] if helpers and behind >= 0 else seat % parts


def copies_at_once(candidates: Iterable[Candidate], parts: int) -> int:
    """Copies of the model that nodes make without any worker that must be built first."""
    built = [candidate.part for candidate in candidates]
    return min(built.count(part) for part in range(parts))


def seats(candidates: Iterable[Candidate], parts: int, copies: int) -> tuple[int, ...]:
    """Seats nodes: each stays at its part, where that has no more nodes than there are copies.

    Of those that are too many for a part, nodes without its state make way first, so that as many as can be keep what
    they hold.  Seats that are left over go to nodes without workers, then to those that are built for another part.

    Args:
        candidates: nodes, at least ``parts * copies``.
        parts: nodes of a copy.
        copies: to be seated.

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
    """The nodes that help: they have state of a part, and neither a seat of a copy nor another part to go to.

    Where two parts differ by two nodes or more, one makes a further copy if it goes over to the other part: it does not
    help, and is free to be built for that.

    Args:
        candidates: nodes.
        parts: nodes of a copy.
        seated: places in the seats of copies, now.
        later: the same once all nodes are built that make as many copies as can be.

    Returns:
        Helpers, by part and place.
    """
    goes_to = {place: seat % parts for seat, place in enumerate(later)}
    free = (one for one in candidates if one.trains and one.part is not None and one.place not in seated)
    stay = (one for one in free if goes_to.get(one.place, one.part) == one.part)
    return tuple(sorted(stay, key=lambda one: (one.part, one.place)))


def _reluctance(one: Candidate) -> tuple[bool, bool, int]:
    return one.part is not None, one.trains, one.place
