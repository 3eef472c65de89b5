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

_MIN_BLOCKS, _MIN_ELEMENTS, _MAX_ELEMENTS = 1024, 1 << 10, 1 << 20

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


def cut_into_blocks(sizes: Sequence[int]) -> tuple[Block, ...]:
    """Returns the blocks of tensors with these numbers of elements, in order.

    A block has at most 1/1024 of all elements, so that shards are balanced for some hundred ranks. But it has at least
    1024 elements, except at the end of a tensor, and at most 2**20.
    """
    max_elements = min(max(_MIN_ELEMENTS, -(-sum(sizes) // _MIN_BLOCKS)), _MAX_ELEMENTS)
    return tuple(
        Block(tensor, start, min(start + max_elements, size))
        for tensor, size in enumerate(sizes)
        for start in range(0, size, max_elements)
    )


@dataclass(frozen=True)
class ShardAssignment:
    """Assignment of all blocks to ranks.

    Attributes:
        members: numbers of the nodes, in the order of ranks.
        ranks: ranks of each node.
        holders: holders of each block.
    """

    members: tuple[int, ...]
    ranks: int
    holders: Holders

    def restricted_to(self, members: Sequence[int], has_state: Sequence[bool]) -> ShardAssignment:
        """Returns this assignment for other members, before any transfer: a shadow replaces a lost owner.

        Args:
            members: active nodes.
            has_state: for each of their ranks, whether it still has its blocks of this assignment (otherwise none).
        """
        index_of = {member: place for place, member in enumerate(members)}
        new_rank: dict[int, int] = {}
        for index, member in enumerate(self.members):
            for local in range(self.ranks) if member in index_of else ():
                rank = index_of[member] * self.ranks + local
                if has_state[rank]:
                    new_rank[index * self.ranks + local] = rank
        return ShardAssignment(
            tuple(members),
            self.ranks,
            tuple(tuple(new_rank[rank] for rank in of if rank in new_rank) for of in self.holders),
        )

    @property
    def lost_blocks(self) -> tuple[int, ...]:
        """Blocks without a holder."""
        return tuple(block for block, of in enumerate(self.holders) if not of)

    def blocks_of_rank(self, rank: int) -> dict[int, int]:
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
    def from_json(cls, document: Mapping[str, Any]) -> ShardAssignment:
        """Returns the assignment of a :meth:`to_json` result; raises ValueError if it is invalid."""
        try:
            return cls(tuple(document["members"]), int(document["ranks"]), tuple(map(tuple, document["holders"])))
        except (KeyError, TypeError) as error:
            raise ElasticError(
                f"the assignment of optimizer state is invalid: {error!r}. Fix: load a complete checkpoint",
                code="expert-plan-invalid",
            ) from None


def assign_blocks(sizes: Sequence[int], members: Sequence[int], ranks: int, holders_per_block: int) -> ShardAssignment:
    """Assigns blocks with these numbers of elements to nodes; pure, so that ranks agree without communication.

    Ranks own consecutive blocks, balanced to within a block. Shadows of a rank have the same local rank on the next
    nodes; with fewer nodes than ``holders_per_block``, other ranks of these nodes follow.
    """
    nodes, size = len(members), len(members) * ranks
    ends = [*itertools.accumulate(sizes)]
    total = ends[-1] if ends else 0
    bounds = [total * rank / size for rank in range(1, size)]
    holders_of_rank = [
        tuple(
            ((rank // ranks + node) % nodes) * ranks + (rank + local) % ranks
            for local in range(ranks)
            for node in range(nodes)
        )[:holders_per_block]
        for rank in range(size)
    ]
    middles = [end - numel / 2 for end, numel in zip(ends, sizes, strict=True)]
    holders = tuple(holders_of_rank[bisect.bisect_right(bounds, middle)] for middle in middles)
    return ShardAssignment(tuple(members), ranks, holders)
