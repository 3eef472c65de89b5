"""Who holds which block of sharded optimizer state, whatever nodes are lost and come."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.elastic.transfers import (
    NoSourceError,
    ShardAssignment,
    StateTensor,
    assign_blocks,
    cut_into_blocks,
    plan_transfers,
)
from moc.state.operators import Region
from tests.errors import raises

SIZES = st.lists(st.integers(0, 5000), min_size=1, max_size=30)
NODES, RANKS, COPIES = st.integers(1, 7), st.integers(1, 3), st.integers(1, 4)


@given(SIZES)
def test_blocks_cover_elements_once_in_any_layout(sizes):
    blocks = cut_into_blocks(sizes)
    assert all(block.numel > 0 for block in blocks)
    for tensor, size in enumerate(sizes):
        of_it = [(block.start, block.stop) for block in blocks if block.tensor == tensor]
        assert [0, *(stop for _, stop in of_it)] == [*(start for start, _ in of_it), size]
    assert max((block.numel for block in blocks), default=0) <= 1024


def test_blocks_of_large_model_are_level_and_few():
    sizes = [32_000 * 4096, *[4096 * 4096] * 128]
    blocks = cut_into_blocks(sizes)
    assert len(blocks) < 3000 and max(block.numel for block in blocks) == 1 << 20


@given(st.lists(st.integers(1, 100), min_size=1, max_size=300), NODES, RANKS, COPIES)
def test_each_block_has_most_holders_on_most_nodes(sizes, nodes, ranks, copies):
    found = assign_blocks(sizes, range(nodes), ranks, copies)
    assert len(found.holders) == len(sizes) and not found.lost_blocks
    for of in found.holders:
        assert len(of) == len(set(of)) == min(copies, nodes * ranks)
        assert len({rank // ranks for rank in of}) == min(copies, nodes)
    owned = Counter()
    for size, (owner, *_) in zip(sizes, found.holders, strict=True):
        owned[owner] += size
    assert max(owned.values()) <= sum(sizes) / (nodes * ranks) + max(sizes)
    assert [of[0] for of in found.holders] == sorted(of[0] for of in found.holders)  # runs


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(2, 7), RANKS, COPIES, st.data())
def test_losses_below_holders_lose_no_block(sizes, nodes, ranks, copies, data):
    before = assign_blocks(sizes, range(nodes), ranks, copies)
    lost = data.draw(st.sets(st.integers(0, nodes - 1), max_size=min(copies, nodes) - 1))
    members = [node for node in range(nodes) if node not in lost]
    left = before.restricted_to(members, [True] * len(members) * ranks)
    assert not left.lost_blocks
    for old, new in zip(before.holders, left.holders, strict=True):
        there = [rank for rank in old if rank // ranks not in lost]
        assert [(members[rank // ranks], rank % ranks) for rank in new] == [(r // ranks, r % ranks) for r in there]


@settings(max_examples=50)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), RANKS, COPIES, st.data())
def test_transfers_come_from_holders_after_any_node_changes(sizes, ranks, copies, data):
    """Nodes are lost and come; some losses cut a move off, before or after it has landed."""
    now, members = assign_blocks(sizes, range(4), ranks, copies), list(range(4))
    has = {
        (member, local): set(now.blocks_of_rank(place * ranks + local))
        for place, member in enumerate(members)
        for local in range(ranks)
    }
    for _ in range(data.draw(st.integers(1, 5))):
        gone = data.draw(st.sets(st.sampled_from(members), max_size=len(members) - 1))
        come = data.draw(st.sets(st.integers(0, 6), max_size=2)) - (set(members) - gone)
        members = sorted((set(members) - gone) | come)
        trained = [member not in come for member in members for _ in range(ranks)]
        now = now.restricted_to(members, trained)
        has = {(m, n): has[m, n] if m not in come else set() for m in members for n in range(ranks)}
        names = [(member, local) for member in members for local in range(ranks)]
        for rank, name in enumerate(names):
            assert set(now.blocks_of_rank(rank)) == has[name]
        wanted = assign_blocks(sizes, members, ranks, copies)
        tensors = [StateTensor(str(n), "", "", Region((0,), (size,)), 1) for n, size in enumerate(sizes)]
        ways = [{str(n): of for n, of in enumerate(one.holders)} for one in (now, wanted)]
        if now.lost_blocks:
            with pytest.raises(NoSourceError):
                plan_transfers(tensors, *ways)
            return
        got = Counter()
        for one in plan_transfers(tensors, *ways, max_bytes=30):
            assert int(one.chunk.operator) in has[names[one.source]] or one.round == 1
            got[names[one.target], int(one.chunk.operator)] += one.chunk.nbytes
        lacking = {
            (name, n) for rank, name in enumerate(names) for n in wanted.blocks_of_rank(rank) if n not in has[name]
        }
        assert got == {(name, n): sizes[n] for name, n in lacking}
        if data.draw(st.booleans()):  # it lands
            now, has = wanted, {name: set(wanted.blocks_of_rank(rank)) for rank, name in enumerate(names)}


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), NODES, RANKS, COPIES)
def test_shard_assignment_survives_json(sizes, nodes, ranks, copies):
    found = assign_blocks(sizes, range(nodes), ranks, copies)
    again = ShardAssignment.from_json(found.to_json())
    assert again == found and again.digest == found.digest
    with raises("expert-plan-invalid"):
        ShardAssignment.from_json({"members": [0]})


def test_workers_agree_on_membership_history():
    before = assign_blocks([5] * 40, range(5), 1, 3)
    met = before.restricted_to([0, 2, 3, 4], [True] * 4).restricted_to([0, 3], [True] * 2)
    assert met == before.restricted_to([0, 3], [True] * 2)
