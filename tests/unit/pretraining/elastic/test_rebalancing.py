"""Which experts move, where to, and whether that pays."""

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.elastic.plan import Plan
from tests.unit.pretraining.flags import PP2, parse

FLAGS = "--elastic --elastic-slots 5 --calculate-per-token-loss --global-batch-size 12"


@pytest.fixture(scope="module")
def elastic():
    from megatron.pretraining.process import cpu

    cpu.install()
    from megatron.pretraining.elastic import placing, rebalancing, replicas

    return placing, rebalancing, replicas


loads = st.lists(st.integers(0, 1000), min_size=8, max_size=8)


def plans_for(elastic, workers, load, flags=FLAGS, previous=None):
    config = parse(flags)
    nodes = elastic[0].nodes_of(config, workers)
    return elastic[0].plans_for(config, nodes, dict.fromkeys(range(4), load), previous)


@settings(max_examples=15)
@given(loads, loads, st.sampled_from([2, 3, 4]))
def test_moves_lead_from_one_plan_to_the_other(elastic, before, after, workers):
    old = plans_for(elastic, workers, before)
    new = plans_for(elastic, workers, after, previous=old)
    for layer in range(4):
        held = [set(old[0].holders(layer, expert)) for expert in range(8)]
        for move in elastic[2].moves(old[0], new[0], layer):
            assert move.source in old[0].holders(layer, move.expert)
            held[move.expert].add(move.target)
        assert all(set(new[0].holders(layer, expert)) <= there for expert, there in enumerate(held))


def test_the_work_of_sending_is_spread(elastic):
    tables = [numpy.array([[0, 1], [0, 1], empty, empty]) for empty in ([-1, -1], [0, 1])]
    old, new = (Plan(tuple(range(4)), tuple(range(4)), 2, 1, {0: table}) for table in tables)
    assert sorted(move.source for move in elastic[2].moves(old, new, 0)) == [0, 0, 1, 1]


def test_stages_have_plans_of_their_own(elastic):
    plans = plans_for(elastic, 4, [1] * 8, f"{FLAGS} {PP2}")
    assert {stage: sorted(plan.tables) for stage, plan in plans.items()} == {0: [0, 1], 1: [2, 3]}
    assert {plan.size for plan in plans.values()} == {2}


def test_experts_that_stay_keep_their_slots(elastic):
    placing, _, _ = elastic
    assert placing.slots_after((3, 5, None, 1), [1, 2, 7, 3]) == (3, 2, 7, 1)
    assert placing.slots_after((0, 1, 2), [2]) == (None, None, 2)


def test_a_plan_by_load_is_more_even(elastic):
    load, flags = [800, 50, 50, 20, 20, 20, 20, 20], f"{FLAGS} --elastic-slots 3"
    first, later = plans_for(elastic, 4, [1] * 8, flags), plans_for(elastic, 4, load, flags)
    before, after = (elastic[1].imbalance(plans, dict.fromkeys(range(4), load)) for plans in (first, later))
    assert after < 1.1 < before
    assert elastic[1].imbalance(first, dict.fromkeys(range(4), [0] * 8)) == 1.0


def test_what_pays(elastic):
    _, rebalancing, _ = elastic
    found = rebalancing.prospect(2.0, 0.5, (3.0, 1.0), moved=1000, second_per_byte=0.1)
    assert found.saves_s == pytest.approx(1.0)  # 1 s of experts at 1.0, and 0.5 s of the rest: experts take 1.5 s now
    assert found.pays(101) and not found.pays(100)


def test_hashes_tell_plans_apart(elastic):
    flags = FLAGS.replace("--elastic-slots 5", "--elastic-slots 6")
    one, same, other = (plans_for(elastic, 4, load, flags) for load in ([1] * 8, [1] * 8, [900] + [1] * 7))
    assert elastic[1].hash_of(one) == elastic[1].hash_of(same) != elastic[1].hash_of(other)
