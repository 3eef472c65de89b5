"""Which experts are to be where, and whether moving them pays."""

import pytest

from tests.unit.pretraining.flags import PP2, parse

FLAGS = "--elastic --elastic-slots 5 --calculate-per-token-loss --global-batch-size 12"


@pytest.fixture(scope="module")
def elastic():
    from megatron.pretraining.process import cpu

    cpu.install()
    from megatron.pretraining.elastic import placement, rebalancing

    return placement, rebalancing


def plans_for(elastic, workers, load, flags=FLAGS, previous=None):
    config = parse(flags, workers=4)
    nodes = elastic[0].nodes_of_stages(config, workers)
    return elastic[0].plans_for(config, nodes, dict.fromkeys(range(4), load), previous)


def test_stages_have_separate_plans(elastic):
    plans = plans_for(elastic, 4, [1] * 8, f"{FLAGS} {PP2}")
    assert {stage: sorted(plan.tables) for stage, plan in plans.items()} == {0: [0, 1], 1: [2, 3]}
    assert {plan.num_ranks for plan in plans.values()} == {2}


def test_unmoved_experts_keep_their_slots(elastic):
    placement, _ = elastic
    assert placement.slots_after((3, 5, None, 1), [1, 2, 7, 3]) == (3, 2, 7, 1)
    assert placement.slots_after((0, 1, 2), [2]) == (None, None, 2)


def test_plan_by_load_is_more_balanced(elastic):
    load, flags = [800, 50, 50, 20, 20, 20, 20, 20], f"{FLAGS} --elastic-slots 3 --elastic-min-replicas 1"
    first, later = plans_for(elastic, 4, [1] * 8, flags), plans_for(elastic, 4, load, flags)
    before, after = (elastic[1].imbalance(plans, dict.fromkeys(range(4), load)) for plans in (first, later))
    assert after < 1.1 < before
    assert elastic[1].imbalance(first, dict.fromkeys(range(4), [0] * 8)) == 1.0


def test_imbalance_is_measured_per_domain(elastic):
    placement, rebalancing = elastic
    flags = f"{FLAGS} --elastic-slots 3 --elastic-min-replicas 1 --elastic-everywhere 0"
    load = [800, 50, 50, 20, 20, 20, 20, 20]
    apart = plans_for(elastic, 6, load, f"{flags} --elastic-domain 3")
    assert apart[0].domains == (3, 3)
    within = [plans_for(elastic, 3, load, flags), plans_for(elastic, 6, load, flags)]
    told = [rebalancing.imbalance(plans, dict.fromkeys(range(4), load)) for plans in (apart, *within)]
    assert told[0] == pytest.approx(told[1], rel=0.01) and told[1] > told[2]


def test_plans_of_other_domains_do_not_fit(elastic):
    placement, _ = elastic
    one, two = (plans_for(elastic, 4, [1] * 8, f"{FLAGS} --elastic-domain {most}") for most in (4, 2))
    assert placement.fit(two, two) and not placement.fit(one, two)


def test_move_pays_if_savings_exceed_transfer_cost(elastic):
    _, rebalancing = elastic
    found = rebalancing.prospect(2.0, 0.5, (3.0, 1.0), moved=1000, second_per_byte=0.1)
    assert found.saves_s == pytest.approx(1.0)  # 1 s of experts at 1.0, and 0.5 s of the rest: experts take 1.5 s now
    assert found.pays(101) and not found.pays(100)


def test_hashes_distinguish_plans(elastic):
    flags = FLAGS.replace("--elastic-slots 5", "--elastic-slots 6")
    one, same, other = (plans_for(elastic, 4, load, flags) for load in ([1] * 8, [1] * 8, [900] + [1] * 7))
    assert elastic[1].hash_of(one) == elastic[1].hash_of(same) != elastic[1].hash_of(other)
