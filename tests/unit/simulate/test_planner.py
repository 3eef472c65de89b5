"""What the planner takes is as good as what simulating everything would find."""

import dataclasses
import random
from statistics import fmean

import pytest

from moc.simulate.engine import Job, simulate
from moc.simulate.failures import Faults
from moc.simulate.planner import Limits, every_candidate, plan
from moc.simulate.policies import POLICIES
from tests.unit.simulate.setups import small_setup


def measured(setup, mtbf_s, found, seeds=3):
    runs = (
        simulate(
            Job(setup.timing.iteration_s, nodes=4, stages=4, seed=seed, wall_s=100 * mtbf_s),
            Faults(mtbf_s),
            POLICIES[found.saving.name](setup, found.options),
        )
        for seed in range(seeds)
    )
    return fmean(run.ettr for run in runs)


def scenario(number):
    rng = random.Random(number)
    iteration_s = rng.uniform(0.5, 8)
    setup = small_setup(
        iteration_s, snapshot_s=iteration_s * rng.uniform(0.3, 6), restart_s=rng.choice([0.0, 30.0, 150.0])
    )
    limits = Limits(exact_only=rng.random() < 0.5, replicas=(rng.choice([1, 2]),))
    return setup, rng.choice([600.0, 1800.0, 7200.0]), limits


@pytest.mark.parametrize("number", range(30))
def test_the_choice_is_within_a_point_of_the_best(number):
    setup, mtbf_s, limits = scenario(number)
    chosen = measured(setup, mtbf_s, plan(setup, mtbf_s, limits).best)
    if chosen > 0.99:
        return
    others = {}
    for found in every_candidate(setup, mtbf_s, limits):
        if (found.saving.exact or not limits.exact_only) and found.plt <= limits.plt:
            others[found.name] = measured(setup, mtbf_s, found)
    assert chosen >= max(others.values()) - 0.01, others


def test_only_exact_policies_where_nothing_may_be_lost():
    setup = small_setup()
    limits = Limits(policies=("full", "pec"))
    assert plan(setup, 600.0, limits).best.saving.name == "pec"
    exact = plan(setup, 600.0, dataclasses.replace(limits, exact_only=True))
    assert exact.best.saving.name == "full" and not exact.others


def test_a_limit_on_lost_tokens_keeps_few_experts_out():
    setup = small_setup(snapshot_s=30)
    ks = [plan(setup, 600.0, Limits(policies=("pec",), plt=limit)).best.options.k for limit in (0.03, 0.001)]
    assert ks[0] < ks[1]


def test_a_limit_on_host_memory_takes_fewer_replicas():
    setup, limits = small_setup(), Limits(policies=("full",))
    two = next(found for found in every_candidate(setup, 600.0, limits) if found.options.replicas == 2)
    found = plan(setup, 600.0, dataclasses.replace(limits, host_bytes=0.9 * two.host_bytes)).best
    assert found.options.replicas == 1
    with pytest.raises(ValueError, match="no policy keeps to all limits"):
        plan(setup, 600.0, dataclasses.replace(limits, host_bytes=1.0))


def test_the_reason_names_what_decided():
    found = plan(small_setup(), 600.0)
    assert found.best.name in found.reason and found.others[0].name in found.reason
    assert f"{found.best.ettr:.3f}" in found.reason
    with pytest.raises(ValueError, match="no policy 'sparze'"):
        Limits(policies=("sparze",))
