"""Who holds which part of the dense optimizer state, when it is sharded and nodes may be lost.

Parameters are cut into *blocks*.  Each has an *owner*, and *shadows* on other nodes, which repeat the owner's updates
on the same reduced gradients and so have the same bits (section 5 has experts alone; with ZeRO-1, one lost node would
end every run).  With f holders of each block, fewer than f simultaneous losses lose none.  Blocks are the same whatever
the number of ranks, so that all holders update alike to the last bit, and state moves block by block.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import xxhash

from moc.elastic.errors import ElasticError

_PARTS, _LEAST, _MOST = 1024, 1 << 10, 1 << 20

Holders = tuple[tuple[int, ...], ...]
"""By block, the ranks that hold it, the owner first."""


class Block(NamedTuple):
    """A range of a flattened tensor.

    Attributes:
        tensor: its index.
        start: of the range, in elements.
        stop: behind its end.
    """

    tensor: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def blocks_of(sizes: Sequence[int]) -> tuple[Block, ...]:
    """The blocks of tensors of so many elements, in order.

    A block has a 1024th of all elements at most, so that shards are level for some hundred ranks; but at least 1024
    elements, and at most a Mi of them, except at the end of a tensor.
    """
    most = min(max(_LEAST, -(-sum(sizes) // _PARTS)), _MOST)
    return tuple(
        Block(tensor, start, min(start + most, size))
        for tensor, size in enumerate(sizes)
        for start in range(0, size, most)
    )


@dataclass(frozen=True)
class Cut:
    """The holders of all blocks among some nodes.

    Attributes:
        members: numbers of the nodes, in the order of ranks.
        ranks: of each node.
        holders: of each block.
    """

    members: tuple[int, ...]
    ranks: int
    holders: Holders

    def among(self, members: Sequence[int], holds: Sequence[bool]) -> Cut:
        """This cut as other members have it, before anything has moved: where the owner is gone, a shadow owns.

        Args:
            members: nodes.
            holds: of each of their ranks, whether it still has the blocks that this cut gives it; it has none if not.
        """
        number = {member: place for place, member in enumerate(members)}
        now: dict[int, int] = {}
        for place, member in enumerate(self.members):
            for local in range(self.ranks) if member in number else ():
                rank = number[member] * self.ranks + local
                if holds[rank]:
                    now[place * self.ranks + local] = rank
        return Cut(
            tuple(members), self.ranks, tuple(tuple(now[rank] for rank in of if rank in now) for of in self.holders)
        )

    @property
    def missing(self) -> tuple[int, ...]:
        """Blocks that nobody holds."""
        return tuple(block for block, of in enumerate(self.holders) if not of)

    def held_by(self, rank: int) -> dict[int, int]:
        """By block that a rank holds, its place among the holders: 0 for the owner."""
        return {block: of.index(rank) for block, of in enumerate(self.holders) if rank in of}

    @cached_property
    def digest(self) -> str:
        """xxh3-128 in hex; equal cuts have equal ones."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self.to_json()).encode())

    def to_json(self) -> dict[str, Any]:
        """For :meth:`from_json`, by ``json.dumps``."""
        return {"members": list(self.members), "ranks": self.ranks, "holders": [list(of) for of in self.holders]}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Cut:
        """The inverse of :meth:`to_json`; raises ValueError for what is no cut."""
        try:
            return cls(tuple(given["members"]), int(given["ranks"]), tuple(map(tuple, given["holders"])))
        except (KeyError, TypeError) as error:
            raise ElasticError(
                f"it is no cut of optimizer state: {error!r}. Fix: load a complete checkpoint",
                code="expert-plan-invalid",
            ) from None


def cut(sizes: Sequence[int], members: Sequence[int], ranks: int, copies: int) -> Cut:
    """Cuts blocks of so many elements among nodes; pure, so that all agree without asking.

    Ranks own runs of blocks that are as level as whole blocks are.  Shadows of a rank are those of the same place on
    the next nodes; where nodes are fewer than ``copies``, others on the same nodes follow.
    """
    nodes, size = len(members), len(members) * ranks
    ends = [*itertools.accumulate(sizes)]
    total = ends[-1] if ends else 0
    bounds = [total * rank / size for rank in range(1, size)]
    of_rank = [
        tuple(
            ((rank // ranks + node) % nodes) * ranks + (rank + local) % ranks
            for local in range(ranks)
            for node in range(nodes)
        )[:copies]
        for rank in range(size)
    ]
    middles = [end - numel / 2 for end, numel in zip(ends, sizes, strict=True)]
    holders = tuple(of_rank[bisect.bisect_right(bounds, middle)] for middle in middles)
    return Cut(tuple(members), ranks, holders)
