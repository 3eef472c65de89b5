"""What is sent from whom to whom when a plan changes."""

import numpy

from moc.elastic.plan import Plan, PlanSettings, make_plan
from moc.elastic.transfers import (
    StateTensor,
    count_new_replicas,
    expert_holders,
    plan_expert_transfers,
    plan_transfers,
)
from moc.state.operators import Region
from tests.cases import each_row
from tests.errors import raises

LAYERS, EXPERTS = 3, 16
TENSORS = [
    StateTensor(f"layers.{layer}.expert.{expert}", name, slot, Region((0, 0), (64, 32)), 4)
    for layer in range(LAYERS)
    for expert in range(EXPERTS)
    for name in ("fc1", "fc2")
    for slot in ("master", "exp_avg", "exp_avg_sq")
]


def loads(seed):
    rng = numpy.random.default_rng(seed)
    return {layer: (1000 * rng.pareto(1, EXPERTS)).astype(int).tolist() for layer in range(LAYERS)}


def changed(nodes, members, ranks=1):
    """Holders before and after, and the transfers between."""
    before = make_plan(range(nodes), loads(0), PlanSettings(6, ranks=ranks))
    after = make_plan(members, loads(1), PlanSettings(6, ranks=ranks), before)
    left, wanted = (
        expert_holders(before.restricted_to(members, [True] * len(members) * before.ranks)),
        expert_holders(after),
    )
    return left, wanted, plan_transfers(TENSORS, left, wanted, max_bytes=1024)


@each_row(
    ("nodes", "members", "ranks"),
    [(10, [0, 1, 2, 4, 5, 6, 7, 8, 9], 1), (6, range(10), 1), (6, [0, 2, 3, 4, 5, 20], 2), (10, range(10), 1)],
)
def test_missing_state_is_sent_once_and_load_balanced(nodes, members, ranks):
    left, wanted, found = changed(nodes, members, ranks)
    got = {rank: {o for o in left if rank in left[o]} for rank in range(len(members) * ranks)}
    elements: dict = {}
    for step in (0, 1):
        arrived = [(one.chunk, one.target) for one in found if one.round < step]
        for one in (one for one in found if one.round == step):
            has_it = one.chunk.operator in got[one.source] or (one.chunk, one.source) in arrived
            assert has_it and one.source != one.target and one.chunk.nbytes <= 1024
            key = one.target, one.chunk.operator, one.chunk.name, one.chunk.state_key
            elements.setdefault(key, numpy.zeros((64, 32), int))[one.chunk.region.slices()] += 1
    assert all((count == 1).all() for count in elements.values())
    lacking = {(rank, o) for o in wanted for rank in wanted[o] if rank not in left[o]}
    assert {key[:2] for key in elements} == lacking and len(elements) == 6 * len(lacking)
    sent = numpy.zeros(len(got))
    for one in found:
        sent[one.source] += one.chunk.nbytes
    alone = numpy.zeros(len(got))  # what no other has, and somebody needs, goes out once
    for operator in {operator for _, operator in lacking if len(left[operator]) == 1}:
        alone[left[operator][0]] += sum(tensor.nbytes for tensor in TENSORS if tensor.operator == operator)
    assert (sent <= numpy.maximum(1.5 * sent.mean(), alone)).all()


def test_state_without_holder_must_be_loaded():
    with raises("state-without-source", "layers.0.expert.3"):
        plan_transfers(TENSORS, {}, {"layers.0.expert.3": [1]})
    assert plan_transfers(TENSORS, {}, {}) == []


def test_single_holder_sends_once_and_receivers_forward():
    dense = [StateTensor("layers.0.attention", "qkv", "master", Region((0,), (4096,)), 4)]
    found = plan_transfers(dense, {"layers.0.attention": [0]}, {"layers.0.attention": range(5)}, max_bytes=256)
    sent = [sum(one.chunk.nbytes for one in found if one.source == rank) for rank in range(5)]
    assert sum(sent) == 4 * 4 * 4096 and max(sent) <= 1.5 * sum(sent) / 5


SIZE = 10_001  # bytes of an expert: parts of it differ


@each_row("seed", range(12))
def test_experts_move_by_layer_with_balanced_senders(seed):
    """From any plan of some members to that of others; within a layer, in two rounds."""
    rng = numpy.random.default_rng(seed)
    nodes, ranks = int(rng.integers(6, 12)), int(rng.integers(1, 3))
    before = make_plan(range(nodes), loads(seed), PlanSettings(6, ranks=ranks))
    members = sorted({*rng.permutation(nodes)[: nodes - 1].tolist(), *range(100, 100 + int(rng.integers(0, 4)))})
    left = before.restricted_to(members, [member < 100 for member in members for _ in range(ranks)])
    after = make_plan(members, loads(seed + 1), PlanSettings(6, ranks=ranks), before)
    found = plan_expert_transfers(expert_holders(left), after, dict.fromkeys(after.tables, SIZE))
    sent, alone, arrived = numpy.zeros(after.num_ranks), numpy.zeros(after.num_ranks), 0
    for layer, flow in found.items():
        assert [one.round for one in flow] == sorted(one.round for one in flow)
        there = {(rank, expert): numpy.full(SIZE, -1) for rank in range(after.num_ranks) for expert in range(EXPERTS)}
        for rank in range(after.num_ranks):
            for expert in left.experts_of(layer, rank):
                there[rank, expert][:] = expert
        for one in flow:
            expert, piece = int(one.chunk.operator.rsplit(".", 1)[1]), one.chunk.region.slices()
            assert (there[one.source, expert][piece] == expert).all()  # it has it, or has got it in round 0
            assert (there[one.target, expert][piece] == -1).all()  # and the other has not
            there[one.target, expert][piece] = expert
            sent[one.source] += one.chunk.nbytes
        for rank in range(after.num_ranks):
            assert all((there[rank, expert] == expert).all() for expert in after.experts_of(layer, rank))
        whole = sum((values >= 0).all() for values in there.values())
        arrived += whole - int((left.replica_matrix(layer) > 0).sum())
        for expert in range(EXPERTS):
            holders = left.holders(layer, expert)
            if len(holders) == 1 and set(after.holders(layer, expert)) - set(holders):
                alone[holders[0]] += SIZE
    assert arrived == count_new_replicas(left, after) and sent.sum() == SIZE * arrived  # nothing moves that need not
    assert (sent <= numpy.maximum(1.5 * sent.mean(), alone + SIZE / 16 * LAYERS)).all()


def test_new_replicas_are_counted():
    tables = [numpy.array([[0, 1], [0, 1], empty, empty]) for empty in ([-1, -1], [0, 1])]
    old, new = (Plan(tuple(range(4)), tuple(range(4)), 2, 1, {0: table}, (4,)) for table in tables)
    assert (count_new_replicas(old, new), count_new_replicas(new, old), count_new_replicas(new, new)) == (4, 0, 0)
