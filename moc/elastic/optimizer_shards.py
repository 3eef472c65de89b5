"""Assigns sharded dense optimizer state to ranks so that it survives lost nodes.

Parameters are cut into *blocks*. Each has an *owner*, and *shadows* on other nodes that repeat the owner's updates with
the same reduced gradients, and so have the same bits. Section 5 covers only experts; with ZeRO-1, one lost node would
end every run. With f holders of each block, fewer than f simultaneous losses lose none. Blocks are the same for any
number of ranks, so all holders compute identical updates, and state moves block by block.
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

from moc.elastic import ElasticError

_PARTS, _LEAST, _MOST = 1024, 1 << 10, 1 << 20

Holders = tuple[tuple[int, ...], ...]
"""By block, the ranks that hold it, the owner first."""


class Block(NamedTuple):
    """A range of a flattened tensor.

    Attributes:
        tensor: index of the tensor.
        start: first element.
        stop: index after the last element.
    """

    tensor: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def blocks_of(sizes: Sequence[int]) -> tuple[Block, ...]:
    """Returns the blocks of tensors with these numbers of elements, in order.

    A block has at most 1/1024 of all elements, so that shards are balanced for some hundred ranks. But it has at least
    1024 elements, except at the end of a tensor, and at most 2**20.
    """
    most = min(max(_LEAST, -(-sum(sizes) // _PARTS)), _MOST)
    return tuple(
        Block(tensor, start, min(start + most, size))
        for tensor, size in enumerate(sizes)
        for start in range(0, size, most)
    )


@dataclass(frozen=True)
class Cut:
    """Assignment of all blocks to ranks.

    Attributes:
        members: numbers of the nodes, in the order of ranks.
        ranks: ranks of each node.
        holders: holders of each block.
    """

    members: tuple[int, ...]
    ranks: int
    holders: Holders

    def among(self, members: Sequence[int], holds: Sequence[bool]) -> Cut:
        """Returns this assignment for other members, before any transfer: a shadow replaces a lost owner.

        Args:
            members: active nodes.
            holds: for each of their ranks, whether it still has its blocks of this assignment; otherwise it has none.
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
        """Blocks without a holder."""
        return tuple(block for block, of in enumerate(self.holders) if not of)

    def held_by(self, rank: int) -> dict[int, int]:
        """Returns the blocks that a rank holds, with its index among the holders: 0 for the owner."""
        return {block: of.index(rank) for block, of in enumerate(self.holders) if rank in of}

    @cached_property
    def digest(self) -> str:
        """xxh3-128 in hex; equal assignments have equal digests."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self.to_json()).encode())

    def to_json(self) -> dict[str, Any]:
        """Returns a dict for ``json.dumps`` and :meth:`from_json`."""
        return {"members": list(self.members), "ranks": self.ranks, "holders": [list(of) for of in self.holders]}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Cut:
        """Returns the assignment of a :meth:`to_json` result; raises ValueError if it is invalid."""
        try:
            return cls(tuple(given["members"]), int(given["ranks"]), tuple(map(tuple, given["holders"])))
        except (KeyError, TypeError) as error:
            raise ElasticError(
                f"it is no cut of optimizer state: {error!r}. Fix: load a complete checkpoint",
                code="expert-plan-invalid",
            ) from None


def cut(sizes: Sequence[int], members: Sequence[int], ranks: int, copies: int) -> Cut:
    """Assigns blocks with these numbers of elements to nodes; pure, so that ranks agree without communication.

    Ranks own consecutive blocks, balanced to within a block. Shadows of a rank have the same local rank on the next
    nodes; with fewer nodes than ``copies``, other ranks of these nodes follow.
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
