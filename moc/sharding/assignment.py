"""Defines save items, assigns each to a rank by two rules, and computes lower bounds of any assignment (MoC, eqs. 8-9).

One rule assigns experts, and one the rest.  Further rules are files in ``moc/sharding/rules``.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moc.errors import UserError, raised
from moc.sharding.parallel_layout import ParallelLayout
from moc.sharding.rules import RULES, Rule, rule


class ShardingError(UserError, ValueError):
    """Invalid sharding scheme, rule or set of holdings; the message names it."""


@dataclass(frozen=True, slots=True)
class SaveItem:
    """Bytes [start, stop) of one slot of one operator.

    Attributes:
        operator: name of the operator.
        slot: ``weights`` (the compute copy), ``optimizer``, only its part ``master``, ``gradients``, or ``modules``
            (state of modules that no optimizer updates).
        slice: index of the tensor-parallel slice; None if every tensor-parallel rank holds the same.
        start: first byte.
        stop: one past the last byte.
        holders: the ranks that hold a copy, in ascending order; exactly one of them saves it.
    """

    operator: str
    slot: str
    slice: int | None
    start: int
    stop: int
    holders: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.start

    @property
    def is_expert(self) -> bool:
        """Whether the item belongs to a routed expert."""
        return ".expert." in self.operator


_ALIGNMENT = 4096  # bytes; pages and elements are not split
_PIECES_PER_SHARE = 64  # small enough to balance layers, large enough to write efficiently


def cut_large_items(items: Sequence[SaveItem]) -> list[SaveItem]:
    """Cuts items larger than an even share, which would otherwise be the bottleneck of a rank.

    Only dense items with several holders are cut.  An even share is the bytes of all such items with the same holders,
    divided by the number of holders.  In most models, layers are smaller than a share, so only the embedding is cut.
    Uncut, it would be the bottleneck; its pieces fill the gaps between layers.
    """
    bytes_by_holders: dict[tuple[int, ...], int] = defaultdict(int)
    for item in items:
        bytes_by_holders[item.holders] += 0 if item.is_expert else item.nbytes
    result = []
    for item in items:
        share = bytes_by_holders[item.holders] // len(item.holders)
        is_uncut = item.is_expert or len(item.holders) == 1 or item.nbytes <= share
        result.extend([item] if is_uncut else _cut(item, share // _PIECES_PER_SHARE))
    return result


def _cut(item: SaveItem, largest: int) -> Iterator[SaveItem]:
    parts = -(-item.nbytes // max(largest, _ALIGNMENT))
    size = -(-item.nbytes // parts // _ALIGNMENT) * _ALIGNMENT
    for start in range(item.start, item.stop, size):
        yield dataclasses.replace(item, start=start, stop=min(start + size, item.stop))


@rule("baseline")
def baseline(items: Sequence[SaveItem], load: Mapping[int, int]) -> list[int]:
    """Assigns items to their first holder: rank 0 the dense operators, the first expert-parallel group the experts.

    MoC, section 4, Figure 7(a).
    """
    return [item.holders[0] for item in items]


@rule("adaptive")
def adaptive(items: Sequence[SaveItem], load: Mapping[int, int]) -> list[int]:
    """Assigns each item, largest first, to its least loaded holder, counting expert parts.

    MoC, section 4.3: dense items fill the gaps that partial experts checkpointing leaves.
    """
    return largest_to_least_loaded(items, load)


def largest_to_least_loaded(items: Sequence[SaveItem], load: Mapping[int, int]) -> list[int]:
    """Assigns items greedily in descending size, each to the least loaded of its holders.

    Items of equal size keep their order, and ties between holders go to the lowest rank.  Without initial loads, and if
    all items have the same m holders, the bottleneck is at most 4/3 - 1/(3m) times the optimum (Graham, 1969).
    """
    total = dict(load)
    saver = [0] * len(items)
    heaps: dict[int, list[tuple[int, int]]] = {}  # by identity of the holders: hashing a thousand ranks is slow
    for index in sorted(range(len(items)), key=lambda i: -items[i].nbytes):
        item = items[index]
        heap = heaps.get(id(item.holders))
        if heap is None:
            heap = heaps[id(item.holders)] = sorted((total.get(rank, 0), rank) for rank in item.holders)
        rank = _least_loaded(heap, total)
        total[rank] = total.get(rank, 0) + item.nbytes
        saver[index] = rank
    return saver


def _least_loaded(heap: list[tuple[int, int]], total: Mapping[int, int]) -> int:
    """Returns the least loaded rank, ties to the lowest; refreshes stale heap entries.

    Loads only grow, so a heap entry is a lower bound of its rank's load; once the top is up to date, no rank has less.
    """
    while True:
        seen, rank = heap[0]
        if seen == total.get(rank, 0):
            return rank
        heapq.heapreplace(heap, (total[rank], rank))


@rule("equal")
def equal(items: Sequence[SaveItem], load: Mapping[int, int]) -> list[int]:
    """Assigns about equally many bytes of these items to each holder, regardless of its other load.

    For experts over expert-parallel groups this is MoC's section 4.1, for layers over data-parallel ranks its section
    4.2.  The paper does not specify the order for layers of unequal size; here the largest goes first.
    """
    return largest_to_least_loaded(items, {})


@dataclass(frozen=True)
class ShardingScheme:
    """Names of the two rules that shard a checkpoint."""

    experts: str
    others: str


SCHEMES: Mapping[str, ShardingScheme] = {
    "baseline": ShardingScheme("baseline", "baseline"),
    "EE": ShardingScheme("equal", "baseline"),
    "EE+EN": ShardingScheme("equal", "equal"),
    "EE+AN": ShardingScheme("equal", "adaptive"),
    "AE+AN": ShardingScheme("adaptive", "adaptive"),
}
"""Schemes of MoC's Figure 10 by their names there, and ``AE+AN``, which also places experts adaptively."""


def parse_scheme(text: str) -> ShardingScheme:
    """Returns the scheme of a flag value: a name in :data:`SCHEMES`, or two rules, ``EXPERTS_RULE,OTHERS_RULE``.

    Raises:
        ShardingError: the text is neither.
    """
    if text in SCHEMES:
        return SCHEMES[text]
    rules = [name.strip() for name in text.split(",")]
    if len(rules) != 2:
        raise ShardingError(
            f"there is no sharding scheme {text!r}. Fix: choose one of {', '.join(SCHEMES)}, or name two rules, one "
            "for experts and one for the rest, as in equal,adaptive",
            code="sharding-rule-unknown",
        )
    for name in rules:
        _named_rule(name)
    return ShardingScheme(*rules)


def _named_rule(name: str) -> Rule:
    if name not in RULES:
        raise ShardingError(
            f"there is no sharding rule {name!r}. Fix: choose one of {', '.join(sorted(RULES))}",
            code="sharding-rule-unknown",
        )
    return RULES[name]


def assign_items(items: Sequence[SaveItem], scheme: ShardingScheme) -> list[int]:
    """Returns the rank that saves each item; identical on every rank, without communication.

    An item with one holder is saved by that rank and counts towards its load.  Experts are assigned next, then the
    rest, so that the rule for the rest receives all other load.

    Raises:
        ShardingError: a rule is unknown, raises an exception, assigns too few or too many items, or chooses a rank that
            does not hold the item.
    """
    result = [item.holders[0] for item in items]  # replaced below if there are several holders
    load: Counter[int] = Counter()
    holders_by_id = {
        id(item.holders): item.holders for item in items
    }  # thousands of items share up to a thousand ranks
    holder_sets = {identity: frozenset(holders) for identity, holders in holders_by_id.items()}
    for item in items:
        if len(item.holders) == 1:
            load[item.holders[0]] += item.nbytes
    for name, for_experts in ((scheme.experts, True), (scheme.others, False)):
        assigns = _named_rule(name)
        indices = [i for i, item in enumerate(items) if len(item.holders) > 1 and item.is_expert == for_experts]
        try:
            ranks = list(assigns([items[i] for i in indices], dict(load)))
        except Exception as error:
            raise ShardingError(
                f"the sharding rule {name} failed ({raised(error, assigns)}). Fix: correct the rule, or choose "
                "another one",
                code="sharding-rule-broken",
            ) from error
        if len(ranks) != len(indices):
            raise ShardingError(
                f"the sharding rule {name} assigned {len(ranks)} of {len(indices)} items. Fix: return one rank for "
                "each item from the rule",
                code="sharding-rule-broken",
            )
        for index, rank in zip(indices, ranks, strict=True):
            if rank not in holder_sets[id(items[index].holders)]:
                raise ShardingError(
                    f"the sharding rule {name} gives {items[index].operator} to rank {rank}, which does not hold it. "
                    "Fix: return only ranks that hold the item from the rule",
                    code="sharding-rule-broken",
                )
            result[index] = rank
            load[rank] += items[index].nbytes
    return result


def bytes_by_rank(items: Sequence[SaveItem], saving_ranks: Sequence[int], world: int) -> list[int]:
    """Returns the bytes that each of ``world`` ranks saves."""
    result = [0] * world
    for item, rank in zip(items, saving_ranks, strict=True):
        result[rank] += item.nbytes
    return result


def ideal_bytes(items: Sequence[SaveItem], layout: ParallelLayout) -> float:
    """Returns the bytes of the bottleneck rank if every byte could go to any rank of its pipeline stage.

    With one stage and a full checkpoint, this is (P_ne + P_e) (B_w + B_o) / D_dp: MoC's eq. 8 with D_dp in place of
    D_ep.  The two agree for one expert-parallel group; with several, each rank holds only 1 / D_dp of the optimizer
    state, and equal sharding of experts divides their weights likewise.
    """
    stage_bytes = [0] * layout.pp
    for item in items:
        stage_bytes[layout.stage(item.holders[0])] += item.nbytes
    return max(stage_bytes) * layout.pp / layout.world


def forced_bytes(items: Sequence[SaveItem]) -> int:
    """Returns the maximum bytes that have one rank as only holder: a lower bound of every assignment's bottleneck."""
    load: Counter[int] = Counter()
    for item in items:
        if len(item.holders) == 1:
            load[item.holders[0]] += item.nbytes
    return max(load.values(), default=0)


def equation_8(non_expert: int, expert: int, weights: int, optimizer: int, dp: int, ep: int) -> float:
    """Returns MoC's eq. 8 as printed: the bytes that each rank ideally saves of a full checkpoint.

    Args:
        non_expert: P_ne, dense parameters.
        expert: P_e, parameters of experts.
        weights: B_w, bytes of weights per parameter.
        optimizer: B_o, bytes of optimizer state per parameter.
        dp: D_dp, data-parallel ranks.
        ep: D_ep, expert-parallel ranks.
    """
    return (non_expert + expert) * optimizer / ep + non_expert * weights / dp + expert * weights / ep


def pec_leaves_ranks_unequal(k: int, moe_layers: int, dp: int, ep: int) -> bool:
    """Returns whether the chosen experts cannot be sharded equally (MoC's eq. 9).

    Either they do not divide over expert-parallel ranks, or the experts of one such rank do not divide over the
    expert-parallel groups.

    Args:
        k: K_pec, experts saved in each layer.
        moe_layers: N_moe, layers with experts.
        dp: D_dp, data-parallel ranks.
        ep: D_ep, expert-parallel ranks.
    """
    return (k * moe_layers) % ep != 0 or (k * moe_layers // ep) % (dp // ep) != 0
