"""Plans: from members and loads alone, whatever is lost, as long as it can be survived."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.elastic.placement import choose_everywhere, place_by_load, placement_imbalance, replicas_by_node
from moc.elastic.plan import (
    Plan,
    PlanSettings,
    assign_greedily,
    make_plan,
    previous_experts,
)
from moc.elastic.survival import survival_probability
from moc.elastic.transfers import count_new_replicas
from tests.cases import each_row
from tests.errors import raises
from tests.unit.policy.routing import RECORDED

LAYERS, NODES, SLOTS = 12, 10, 6  # Lazarus, section 6.1


@pytest.fixture(scope="module")
def recorded():
    """Tokens of the hottest experts of each layer, as section 6.1 makes a trace of them: [iterations, layers, 16]."""
    if not RECORDED.exists():
        pytest.skip("the recorded loads of SmartMoE are not on this machine")
    with numpy.load(RECORDED, allow_pickle=False) as file:
        tokens = file["tokens"][:, :LAYERS].astype(numpy.int64)
    hottest = numpy.argsort(-tokens.sum(axis=0), axis=1, kind="stable")
    return numpy.take_along_axis(tokens, hottest[None, :, :16], axis=2)


def by_layer(rows):
    return dict(enumerate(rows.tolist()))


def made(nodes=4, experts=8, slots=4, layers=2, seed=0, **more):
    rng = numpy.random.default_rng(seed)
    loads = {layer: rng.integers(0, 1000, experts).tolist() for layer in range(0, 2 * layers, 2)}
    return make_plan(range(nodes), loads, PlanSettings(slots, **more)), loads


def test_plan_survives_json_and_digest_identifies_it():
    one, _ = made(seed=1, ranks=2)
    again = Plan.from_json(json.loads(json.dumps(one.to_json())))
    assert again == one and again.digest == one.digest and hash(again) == hash(one)
    assert made(seed=2, ranks=2)[0] != one
    assert made(seed=1, ranks=2)[0].digest == one.digest
    with raises("expert-plan-invalid"):
        Plan.from_json({"members": [1]})


def _tables(change):
    tables = json.loads(json.dumps(made(seed=1, ranks=2)[0].to_json()["tables"]))
    change(tables["0"])
    return {"tables": tables}


@each_row(
    "wrong",
    [
        {"tables": {"0": [[1, 2]]}},
        {"tables": {"x": []}},
        {"tables": {"-1": []}},
        {"members": [0, 1, 2, 2]},
        {"members": [0, 1, 2, -3]},
        {"members": [0, 1, 2]},
        {"members": [], "columns": [], "tables": {}},
        {"columns": [0, 1, 2, 4]},
        {"columns": [0, 1, 1, 2]},
        {"columns": [0, 1, 2, 3.0]},
        {"experts": 7},
        {"experts": 10**9},
        {"experts": "8"},
        {"experts": True},
        {"ranks": 0},
        {"ranks": 10**18},
        {"domains": [4, 0]},
        {"domains": [3]},
        {"domains": [5, -1]},
        _tables(lambda table: table[0].reverse()),
        _tables(lambda table: table[0].__setitem__(0, 8)),
        _tables(lambda table: table[0].__setitem__(0, -2)),
        _tables(lambda table: table[0].__setitem__(1, table[0][0])),
        _tables(lambda table: table[0].__setitem__(0, -1)),
        _tables(lambda table: table[0].pop()),
        _tables(lambda table: table.pop()),
        _tables(lambda table: table[0].__setitem__(0, 1.5)),
        _tables(lambda table: table[0].__setitem__(0, 2**70)),
    ],
    ids=repr,
)
def test_invalid_plan_is_refused(wrong):
    with raises("expert-plan-invalid"):
        Plan.from_json(made(seed=1, ranks=2)[0].to_json() | wrong)


def test_plan_without_expert_is_not_complete():
    one = made(seed=1)[0]
    assert one.is_complete
    least = min(range(one.experts), key=lambda expert: len(one.holders(0, expert)))
    stays = [rank not in one.holders(0, least) for rank in range(one.num_ranks)]
    assert not one.restricted_to(one.members, stays).is_complete


@settings(deadline=None, max_examples=40)
@given(st.sets(st.integers(0, 9), min_size=1), st.sets(st.integers(0, 9), min_size=1), st.integers(1, 2), st.data())
def test_restricted_plan_contains_state_of_remaining_members(met, there, ranks, data):
    """Whether a worker has met members in between or not."""
    before = make_plan([1, 2, 4, 6, 7], {0: [9, 5, 3, 1]}, PlanSettings(2, ranks=ranks))
    met, there = sorted(met), sorted(there)
    holds = [member in before.members and data.draw(st.booleans()) for member in there for _ in range(ranks)]
    found = before.restricted_to(there, holds)
    old = {(m, r): before.experts_of(0, n * ranks + r) for n, m in enumerate(before.members) for r in range(ranks)}
    new = {(m, r): found.experts_of(0, n * ranks + r) for n, m in enumerate(there) for r in range(ranks)}
    assert new == {
        (m, r): old[m, r] if held else ()
        for (m, r), held in zip(((m, r) for m in there for r in range(ranks)), holds, strict=True)
    }
    assert sorted(found.columns) == list(range(len(there)))
    lost = {(0, e) for e in range(4)} - {(0, e) for held in new.values() for e in held}
    assert set(found.lost_experts(there)) == lost
    staying = [member in met and held for member, held in zip(numpy.repeat(there, ranks), holds, strict=True)]
    by_way_of = before.restricted_to(met, [member in before.members for member in met for _ in range(ranks)])
    assert by_way_of.restricted_to(there, staying) == before.restricted_to(there, staying)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6))
def test_any_membership_history_keeps_f_replicas(seed):
    rng = numpy.random.default_rng(seed)
    experts, ranks, slots = int(rng.integers(1, 13)), int(rng.integers(1, 4)), int(rng.integers(1, 5))
    least = -(-experts // (slots * ranks))  # nodes
    members, previous = list(range(int(rng.integers(least, least + 5)))), None
    for step in range(4):
        loads = {layer: rng.integers(0, rng.choice([1, 3, 500]), experts).tolist() for layer in (1, 3)}
        now = make_plan(members, loads, PlanSettings(slots, ranks=ranks), previous)
        assert sorted(now.columns) == list(range(len(members)))
        assert now == make_plan(members, loads, PlanSettings(slots, ranks=ranks), previous)
        f = min(2, len(members), len(members) * slots * ranks // experts)
        for layer in loads:
            held = now.replicas_by_node(layer)
            assert held.max() <= 1 and held.sum(axis=1).min() >= f
            assert sum(len(now.experts_of(layer, rank)) for rank in range(now.num_ranks)) == held.sum()
        for lost in range(f):
            gone = rng.choice(members, lost, replace=False)
            assert now.lost_experts([member for member in members if member not in gone]) == ()
        kept = rng.permutation(members)[: int(rng.integers(least, len(members) + 1))].tolist()
        members, previous = sorted(kept) + [100 * (step + 1)] * int(rng.integers(0, 2)), now


def test_lost_experts_are_those_without_replica():
    one, loads = made(nodes=4, experts=8, slots=4)
    for members in itertools.combinations(range(4), 1):
        assert {expert for layer, expert in one.lost_experts(members) if layer == 0} == set(range(8)) - set(
            one.experts_of(0, members[0])
        )


def test_ranks_of_node_share_its_work():
    loads = {0: [1000, 999, 10, 9]}
    one = make_plan(range(3), loads, PlanSettings(2, ranks=2))
    assert all(set(one.experts_of(0, rank)) in ({0, 3}, {1, 2}) for rank in range(6))


def test_cold_experts_mostly_keep_their_node():
    """All of them have f replicas, and are in the order of their numbers; in that of their loads, they would move."""

    def moved(loads, **how):
        old, new = (replicas_by_node(place_by_load(row, 6, SLOTS, 2, **how), 16) for row in loads)
        return int((new > old).sum())

    drawn = [numpy.random.default_rng(seed) for seed in range(6)]
    changes = [[[1000] * 4 + rng.permutation(range(10, 22)).tolist() for _ in range(2)] for rng in drawn]
    assert sum(map(moved, changes)) <= 0.5 * sum(moved(loads, same_groups=True) for loads in changes)


def test_few_replicas_move_in_200_steps_of_recorded_loads(recorded):
    counts = []
    for number in range(20, len(recorded) - 20, 60):
        before = make_plan(range(8), by_layer(recorded[number]), PlanSettings(SLOTS))
        after = make_plan(range(8), by_layer(recorded[number + 20]), PlanSettings(SLOTS), before)
        counts.append(count_new_replicas(before, after))
    assert numpy.mean(counts) < 70


def test_figure_8_order_survives_more(recorded):
    rows = recorded[20]  # step 201
    one = make_plan(range(NODES), by_layer(rows), PlanSettings(SLOTS))
    assert survival_probability(numpy.concatenate([one.replicas_by_node(layer) for layer in range(LAYERS)]), 4) >= 0.60


def test_losses_below_f_survive_on_recorded_loads(recorded):
    for rows in recorded[::40]:
        for experts in (8, 12, 16):
            one = make_plan(range(NODES), by_layer(rows[:, :experts]), PlanSettings(SLOTS))
            assert min(one.replicas_by_node(layer).sum(axis=1).min() for layer in range(LAYERS)) >= 2


@each_row("experts", [8, 12, 16])
def test_busiest_node_is_balanced_on_recorded_loads(recorded, experts):
    fresh, old = [], []
    for now, later in zip(recorded[::20, :, :experts], recorded[20::20, :, :experts], strict=False):
        one = make_plan(range(NODES), by_layer(now), PlanSettings(SLOTS))
        for found, rows in ((fresh, now), (old, later)):
            found.append(numpy.mean([placement_imbalance(row, one.tables[layer]) for layer, row in enumerate(rows)]))
    assert numpy.mean(fresh) <= 1.02 and numpy.mean(old) <= 1.10


def test_greedy_assignment_is_nearly_optimal():
    rng = numpy.random.default_rng(0)
    for _ in range(100):
        shared = rng.integers(0, 10, (6, 6))
        best = max(sum(shared[row, column] for row, column in enumerate(p)) for p in itertools.permutations(range(6)))
        assert sum(shared[row, column] for row, column in enumerate(assign_greedily(shared))) >= 0.9 * best


def test_unchanged_inputs_move_nothing():
    one, loads = made(nodes=7, experts=10, ranks=2)
    assert make_plan(range(7), loads, PlanSettings(4, ranks=2), one).tables.keys() == one.tables.keys()
    again = make_plan(range(7), loads, PlanSettings(4, ranks=2), one)
    assert all((again.tables[layer] == one.tables[layer]).all() for layer in loads)
    assert (previous_experts(one, [3, 99], 0)[1] == -1).all()


def test_fewest_experts_are_placed_everywhere_for_balance():
    hot = [[1000, 1, 1, 1, 1, 1, 1, 1]]
    assert choose_everywhere(hot, 8, 2, 2) == 0 or choose_everywhere(hot, 8, 2, 2) == 1
    assert choose_everywhere([[1] * 8], 8, 2, 2) == 0


def test_frequent_losses_weigh_survival_more_than_balance():
    loads = {0: [40, 5, 2, 40, 40, 1, 5, 2]}
    rarely, often = (make_plan(range(4), loads, PlanSettings(3, 1, mtbf_s=mtbf_s)) for mtbf_s in (3600.0, 60.0))
    assert [int((plan.replica_counts() == 4).sum()) for plan in (rarely, often)] == [1, 0]


def test_planning_does_not_import_torch():
    program = "import sys; from moc.elastic import transfers, plan, survival; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[3]).returncode == 0
