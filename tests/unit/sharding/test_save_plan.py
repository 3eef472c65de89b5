"""Whoever holds what, and whatever the rules: each element is saved by exactly one rank, the same on every rank."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.sharding import RULES, SCHEMES, ShardingScheme
from moc.sharding.save_plan import (
    ByteRange,
    ReplicaDescriptor,
    StageReplicas,
    describe_replicas,
    pack_descriptors,
    plan_shards,
    plan_storage_shards,
    planned_bytes_by_rank,
    replicated_operators,
    select_fragments,
    unpack_descriptors,
)
from tests.cases import each_row
from tests.errors import raises
from tests.unit.sharding.fragment_worlds import (
    NAMES,
    SLOTS,
    Detail,
    OwnedSlice,
    Piece,
    Region,
    Tensor,
    World,
    fragments_of,
    plans,
    slot_values,
    worlds,
)

EVERY_SCHEME = [ShardingScheme(a, b) for a in sorted(RULES) for b in sorted(RULES)]


def told(world: World) -> dict[int, list[ReplicaDescriptor]]:
    """What each rank tells the others, for all details."""
    return {
        rank: [h for d in SLOTS for h in describe_replicas(world.fragments(rank, dict.fromkeys(NAMES, d)), d)]
        for rank in world.ranks
    }


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(worlds(), plans())
def test_every_element_is_saved_once_with_its_value(world, plan):
    stage = StageReplicas(told(world))
    for scheme in {*EVERY_SCHEME, *SCHEMES.values()}:
        parts = plan_shards(stage, plan, scheme)
        assert set(parts) <= set(world.ranks)
        counts = {}
        for rank in world.ranks:
            for fragment in select_fragments(world.fragments(rank, plan), parts.get(rank, [])):
                whole = next(t.values for t in world.tensors if t.name == fragment.name)
                assert fragment.global_shape == whole.shape
                expected = slot_values(whole, fragment.slot)[fragment.region.slices()]
                assert torch.equal(fragment.view, expected.reshape(-1))
                local = fragment.tensor.view(-1)[fragment.start :][: fragment.region.numel]
                assert torch.equal(slot_values(local, fragment.slot), fragment.view)
                count = counts.setdefault((fragment.name, fragment.slot), torch.zeros(whole.shape, dtype=torch.int))
                count[fragment.region.slices()] += 1
        assert all((count == 1).all() for count in counts.values())
        assert set(counts) == wanted(world, plan)


def wanted(world: World, plan: dict) -> set[tuple[str, str]]:
    """Every slot of every tensor that the plan asks for."""
    found = {(f.name, f.slot) for rank in world.ranks for f in world.fragments(rank, plan)}
    assert {name for name, _ in found} == {t.name for o in plan for t in world.tensors if t.name in NAMES[o]}
    return found


def counted(world: World, plan: dict, parts: dict, ranks, joins: bool) -> tuple[dict, set]:
    """How often each element is saved by some ranks, and all boxes."""
    counts, boxes = {}, set()
    for rank in ranks:
        for fragment in select_fragments(world.fragments(rank, plan), parts.get(rank, []), joins):
            key = fragment.name, fragment.slot
            count = counts.setdefault(key, torch.zeros(fragment.global_shape, dtype=torch.int))
            count[fragment.region.slices()] += 1
            boxes.add((*key, fragment.region))
    return counts, boxes


@settings(max_examples=30, deadline=None)
@given(worlds(), plans(), st.sampled_from(EVERY_SCHEME), st.data())
def test_nodes_save_equal_chunks_and_storage_gets_each_once(world, plan, scheme, data):
    of_replica = data.draw(st.lists(st.sampled_from("abc"), min_size=world.dp, max_size=world.dp))
    nodes, stage = [of_replica[rank // world.tp] for rank in world.ranks], StageReplicas(told(world))
    parts = plan_shards(stage, plan, scheme, nodes)
    boxes = {}
    for node in set(nodes):
        here = [rank for rank in world.ranks if nodes[rank] == node]
        counts, boxes[node] = counted(world, plan, parts, here, joins=False)
        held = {}
        for f in (f for rank in here for f in world.fragments(rank, plan)):
            held.setdefault((f.name, f.slot), torch.zeros(f.global_shape, dtype=torch.int))[f.region.slices()] = 1
        assert held.keys() == counts.keys() and all(torch.equal(counts[key], held[key]) for key in held)
    for one, other in combinations(boxes.values(), 2):  # a box that two nodes hold is a box of both
        assert not any(a != b and a[:2] == b[:2] and a[2].intersect(b[2]) for a in one for b in other), (
            "boxes overlap in part"
        )
    stored = plan_storage_shards(stage, plan, scheme, nodes)
    counts, once = counted(world, plan, stored, world.ranks, joins=False)
    assert all((count == 1).all() for count in counts.values()) and set(counts) == wanted(world, plan)
    assert once <= set.union(*boxes.values())
    assert all(set(stored.get(rank, [])) <= set(parts.get(rank, [])) for rank in world.ranks)
    loads = planned_bytes_by_rank(stage, plan, scheme, nodes)
    alike = replicated_operators(stage, plan, nodes)
    more = sum((len(of) - 1) * amount for of, operators in alike.items() for amount in operators.values())
    assert sum(loads.values()) == sum(planned_bytes_by_rank(stage, plan, scheme).values()) + more


@settings(max_examples=30, deadline=None)
@given(worlds(), plans(), st.sampled_from(EVERY_SCHEME))
def test_every_rank_computes_same_plan(world, plan, scheme):
    here = told(world)
    elsewhere = {rank: unpack_descriptors(pack_descriptors(holdings)) for rank, holdings in reversed(here.items())}
    backwards = dict(reversed(plan.items()))
    assert plan_shards(StageReplicas(here), plan, scheme) == plan_shards(StageReplicas(elsewhere), backwards, scheme)


@settings(max_examples=30, deadline=None)
@given(worlds(), plans())
def test_rank_saves_as_many_bytes_as_rules_counted(world, plan):
    """So what ZeRO gives to one rank alone is load to them."""
    stage, scheme = StageReplicas(told(world)), SCHEMES["AE+AN"]
    items, counted = stage.items(plan), dict.fromkeys(world.ranks, 0)
    for item in items:
        if stage.replica_id(item, plan[item.operator]) is None:
            counted[item.holders[0]] += item.nbytes
    parts = plan_shards(stage, plan, scheme)
    for rank in world.ranks:
        counted[rank] += sum(part.stop - part.start for part in parts.get(rank, []))
        mine = select_fragments(world.fragments(rank, plan), parts.get(rank, []))
        # an element whose slots lie across a cut goes to where it begins
        assert abs(counted[rank] - nbytes(mine)) <= 12 * len(parts.get(rank, []))
    assert sum(counted.values()) == sum(item.nbytes for item in items)
    assert max(planned_bytes_by_rank(stage, plan, scheme).values(), default=0) == max(counted.values())


def nbytes(fragments) -> int:
    return sum(f.view.numel() * f.view.element_size() for f in fragments)


ATTENTION, NORM = NAMES["layers.0.attention"]


def world(tp: int = 1, dp: int = 2, zero: bool = False) -> World:
    """A matrix of 12 kB, sliced, and a norm."""
    matrix = Tensor(ATTENTION, torch.arange(3000).view(6, 500) % 251, True, tuple(range(dp)), (0.5,) * (dp - 1))
    return World(tp, dp, zero, (matrix, Tensor(NORM, torch.arange(6), False, matrix.places, matrix.cuts)))


FULL = {"layers.0.attention": Detail.FULL}


def test_sliced_and_unsliced_items_have_own_holders():
    items = StageReplicas(told(world(tp=2, dp=2))).items(FULL)
    assert {(i.slice, i.nbytes, i.holders) for i in items} == {
        (None, 6 * 12, (0, 1, 2, 3)), (0, 1500 * 12, (0, 2)), (1, 1500 * 12, (1, 3))
    }  # fmt: skip
    assert {(item.operator, item.slot) for item in items} == {("layers.0.attention", "optimizer")}


def test_large_operator_is_split_and_rank_parts_joined():
    here = world(dp=2)
    parts = plan_shards(StageReplicas(told(here)), FULL, SCHEMES["EE+EN"])
    by_rank = [select_fragments(here.fragments(rank, FULL), parts[rank]) for rank in (0, 1)]
    assert abs(nbytes(by_rank[0]) - nbytes(by_rank[1])) <= 4096 + 12
    for mine in by_rank:  # an element's master and moments stay together
        assert len({tuple((f.name, f.region) for f in mine if f.slot == slot) for slot in SLOTS[Detail.FULL]}) == 1
    everything = plan_shards(StageReplicas(told(here)), FULL, SCHEMES["baseline"])
    whole = select_fragments(here.fragments(0, FULL), everything[0])
    assert [f.region for f in whole if f.slot == "master"] == [
        f.region for name in (NORM, ATTENTION) for f in here.fragments(0, FULL) if (f.name, f.slot) == (name, "master")
    ]


@each_row("sharded", [False, True])
def test_candidates_are_copies_on_first_holding_stage(sharded):
    """Tied embeddings: the last pipeline stage has copies too."""

    def holdings(replica: tuple[int, ...]) -> list[ReplicaDescriptor]:
        local = torch.zeros(4)
        piece = Piece("embedding.word_embeddings.weight", (4,), Region((0,), (4,)), local, 0, replica, False)
        owned = OwnedSlice(local, 0, 4, {"master": local}, sharded)
        return describe_replicas(fragments_of(owned, [piece]), Detail.FULL)

    assert [(h.nbytes, h.total) for h in holdings((0, 0, 1))] == [(16, 0 if sharded else 16)]
    assert holdings((1, 0, 0)) == holdings((1, 0, 1)) == []


def test_inconsistent_replica_descriptors_are_refused():
    everyone = told(world(tp=2))
    with raises("holdings-misfit", "layers.0.attention", "18000 of 36000"):
        StageReplicas({rank: everyone[rank] for rank in (0, 2)})  # the first slice alone
    other = told(world(tp=1))
    with raises("holdings-misfit", "layers.0.attention"):
        StageReplicas({0: other[0], 1: [h._replace(replica_id="something else") for h in other[1]]})


def test_chunk_of_undescribed_tensor_is_refused():
    fragments = world().fragments(0, FULL)
    with raises("holdings-misfit", "layers.9.mlp"):
        select_fragments(fragments, [ByteRange("layers.9.mlp", "abc", 0, 8)])
    parts = plan_shards(StageReplicas(told(world())), FULL, SCHEMES["baseline"])[0]
    with raises("holdings-misfit"):
        select_fragments(world().fragments(0, {"layers.0.attention": Detail.COMPUTE}), parts)


def test_item_order_is_independent_of_replica_order():
    """Ties would go another way on a rank that does not unpack its own."""
    biases = [ReplicaDescriptor(f"layers.{n}.router", "full", "weights", f"copy {n}", 4, 4) for n in (1, 2)]
    here = {0: [ReplicaDescriptor("layers.2.router", "full", "optimizer", "", 8, 0), *biases], 1: biases}
    plan = {f"layers.{n}.router": Detail.FULL for n in (1, 2)}
    items = StageReplicas(here).items(plan)
    assert items == StageReplicas(
        {rank: unpack_descriptors(pack_descriptors(holdings)) for rank, holdings in here.items()}
    ).items(plan)
    assert [item.operator for item in items if item.slot == "weights"] == ["layers.1.router", "layers.2.router"]


def test_replicated_state_is_sent_first_in_equal_shares():
    copies = [ReplicaDescriptor(f"layers.{n}.router", "full", "weights", f"copy {n}", 4, 4) for n in (1, 2)]
    alone = [ReplicaDescriptor("output", "full", "optimizer", "", size, 0) for size in (8, 12)]
    texts = [pack_descriptors([one, *copies]) for one in alone]
    assert [unpack_descriptors(text) for text in texts] == [[*copies, one] for one in alone]
    middle = 4 + int.from_bytes(texts[0][:4], "big")
    assert texts[0][:middle] == texts[1][:middle] and texts[0][middle:] != texts[1][middle:]


def test_unknown_rule_is_refused():
    with raises("sharding-rule-unknown", "'x'", "adaptive", "baseline", "equal"):
        plan_shards(StageReplicas(told(world())), FULL, ShardingScheme("equal", "x"))
