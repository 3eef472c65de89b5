"""How seldom an elastic job needs a checkpoint."""

import pytest

from moc.simulate.elastic import REGROUP_S, ElasticSettings
from moc.simulate.lasting import Lasting
from moc.simulate.live_costs import Running, Saved
from moc.simulate.planner import PlanLimits, best_of, every_candidate

TWO = ElasticSettings(slots=3, least=2, everywhere=0)
HOT = {0: [900, 40, 30, 30]}


def lasting(least: int, most: int, settings: ElasticSettings = TWO) -> Lasting:
    return Lasting(least, most, ranks=1, experts=4, settings=settings)


def test_fewer_than_f_lost_at_once_are_survived_and_the_riskiest_members_count():
    one, two, *_ = lasting(3, 6).survivals(HOT)
    assert one == 1.0 and two < 1.0
    assert lasting(3, 3).survivals(HOT)[1] == two  # more nodes survive no less
    assert lasting(6, 6).survivals(HOT)[1] > two


def test_a_checkpoint_is_needed_when_a_second_node_is_lost_before_all_have_gone_on():
    job, mtbf_s = lasting(3, 6), 3600.0
    again = REGROUP_S / mtbf_s
    two = job.survivals()[1]
    assert job.rarer(mtbf_s) == pytest.approx(1 / (again * (1 - two)), rel=0.05)
    assert job.rarer(100 * mtbf_s) > 50 * job.rarer(mtbf_s)
    assert job.rarer(REGROUP_S / 2) == pytest.approx(1.0)  # all are lost before any has gone on


def test_with_one_holder_each_loss_needs_a_checkpoint():
    alone = lasting(2, 2, ElasticSettings(slots=2, least=1, everywhere=0))
    assert alone.survivals()[0] == 0.0 and alone.rarer(1e9) == pytest.approx(1.0)


def test_a_policy_whose_workers_go_on_is_rarely_needed_and_saves_less_often():
    run = Running("disk", 4, 1, Saved(1e9, {1: 5e8, 4: 1e9}, []), 1.0, 0.8, copy_rate=5e8, write_rate=1e9)
    policies = ("full", "pec")
    usual, rarely = (PlanLimits(policies=policies, plt=1.0, rarer=rarer) for rarer in (1.0, lasting(3, 4).rarer(600.0)))
    before, after = (best_of(every_candidate(run, 600.0, limits), 1.0, 600.0, limits) for limits in (usual, rarely))
    assert before.best.saving.name == after.best.saving.name == "pec"
    assert after.best.saving.interval > 2 * before.best.saving.interval
    assert after.best.ettr > before.best.ettr
