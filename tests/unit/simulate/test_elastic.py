"""Elastic jobs in simulation, by placements that were worked out by hand."""

import dataclasses

import pytest

from moc.simulate.elastic import ElasticCosts, ElasticMembers, ElasticSettings, stretched
from moc.simulate.engine import SimulatedJob, simulate
from moc.simulate.failures import ClusterEvent, Faults
from moc.simulate.policies import POLICIES, Options
from moc.simulate.policy_costs import SimulatedCosts, VaryingNodes
from tests.unit.simulate.setups import small_setup

EQUAL = (10**6,) * 4
TWO_SLOTS = ElasticSettings(slots=2)


def four_nodes(**changes) -> ElasticMembers:
    """Four experts with two replicas each: two nodes hold two of them, the others the other two."""
    given = {"micro_batches": 8, "usual": 2, "stages": ((EQUAL,),), "settings": TWO_SLOTS, "grow_s": 3.0, **changes}
    return ElasticMembers(2, 4, **given)


def test_survival_matches_placement_plan():
    members = four_nodes()
    assert [members.survival(4, lost) for lost in range(6)] == pytest.approx([1, 1, 4 / 6, 0, 0, 0])
    several = four_nodes(stages=((EQUAL, (10**6, 2 * 10**6, 10**6, 2 * 10**6)),))  # one order of nodes for all layers
    assert several.survival(4, 2) == pytest.approx(4 / 6)
    everywhere = four_nodes(settings=ElasticSettings(slots=4))
    assert [everywhere.survival(4, lost) for lost in (1, 2, 3, 4)] == [1, 1, 1, 0]


def test_stage_is_lost_with_all_of_its_nodes():
    members = four_nodes(stages=((EQUAL[:2],), ()))  # all experts on each node; the other stage is dense
    assert [members.survival(4, lost) for lost in range(5)] == pytest.approx([1, 1, 4 / 6, 0, 0])
    assert members.survival(3, 1) == pytest.approx(2 / 3)  # 2 nodes and 1
    assert members.survival(2, 1) == 0
    crowded = four_nodes(stages=((EQUAL[:2],),) * 4, ranks=8, micro_batches=64, usual=8)
    assert crowded.survival(2, 1) == 0 and crowded.survival(2, 0) == 1  # a node has two stages
    assert [crowded.trained_on(nodes) for nodes in (4, 3, 2)] == [8, 6, 4]


def test_survival_of_many_nodes_is_bounded_from_below():
    loads = tuple(range(1, 17))
    members = ElasticMembers(20, 40, stages=((loads, loads[::-1]),), settings=ElasticSettings(slots=2))
    chances = [members.survival(40, lost) for lost in range(41)]
    assert chances[:2] == [1, 1] and chances == sorted(chances, reverse=True) and chances[40] == 0


def test_ranks_round_micro_batches_up():
    members = four_nodes()
    assert [members.slowdown(nodes) for nodes in (4, 3, 2)] == pytest.approx([1, 3 / 2, 2])  # 2, 3, 4 rounds
    piped = four_nodes(stages=((EQUAL,), (EQUAL,)), ranks=2, tp=2, micro_batches=8, usual=4)
    assert piped.slowdown(4) == 1 and piped.slowdown(3) == pytest.approx((8 + 1) / (4 + 1))  # 2 + 1 nodes: D is 1


def test_busiest_rank_determines_load_factor():
    uneven = ElasticMembers(2, 2, stages=(((3, 1),),), share=0.5, settings=ElasticSettings(slots=1, least=1))
    assert uneven.load_factor(2) == pytest.approx(1 + 0.5 * (3 / 2 - 1))


def test_default_slots_fit_all_replicas_on_fewest_nodes():
    assert four_nodes(settings=ElasticSettings()).slots == 4  # 2 of each of 4 experts on 2 nodes
    assert four_nodes(settings=ElasticSettings(), ranks=4).slots == 1
    with pytest.raises(ValueError, match="2 slots"):
        four_nodes(settings=ElasticSettings(slots=1))


def test_loads_are_stretched_to_other_number_of_experts():
    assert stretched([1, 4, 2, 3], 4) == [4, 3, 2, 1]
    assert stretched([40, 20], 4) == [40, 35, 25, 20] and stretched([40, 30, 20, 10], 2) == [35, 15]


STORED = SimulatedCosts("elastic", interval=25, restart_s=20, replay_s=1, why="an expert was lost")


def run(*events: ClusterEvent, members: VaryingNodes | None = None, seed: int = 0):
    members = members or four_nodes()
    saving = ElasticCosts("elastic", interval=1, restart_s=5, replay_s=1, members=members, beyond=STORED)
    job = SimulatedJob(1.0, nodes=4, wall_s=100, available=4, seed=seed)
    return simulate(job, Faults(trace=events), saving)


def test_loss_that_leaves_every_expert_replays_nothing():
    result = run(ClusterEvent(31, lost=1))
    assert result.recovery_s == 5 and result.replayed == 0 and not result.fallbacks
    assert result.samples == pytest.approx(512 * (31 + 64 / 1.5)) and result.nodes_s == pytest.approx({3: 69, 4: 31})


def test_two_losses_use_storage_only_if_an_expert_is_lost():
    found = [run(ClusterEvent(31, lost=2), seed=seed) for seed in range(100)]
    fatal = [result for result in found if result.fallbacks]
    assert len(fatal) / len(found) == pytest.approx(2 / 6, abs=0.12)
    for result in fatal:
        ((why, times),) = result.fallbacks.items()
        assert "expert" in why and "2 of 4" in why and times == 1
        assert result.recovery_s == pytest.approx(20 + 6 * 2)  # iterations 25 to 31 again, at half the speed
    assert {result.recovery_s for result in found if not result.fallbacks} == {5}


def test_second_loss_joins_incident_until_training_resumes():
    """Until then, new replicas are nowhere; afterwards, three nodes hold all experts twice or once."""
    together = [run(ClusterEvent(31, lost=1), ClusterEvent(33, lost=1), seed=seed) for seed in range(100)]
    assert sum(bool(result.fallbacks) for result in together) / 100 == pytest.approx(2 / 6, abs=0.12)
    full = four_nodes(settings=ElasticSettings(slots=4))
    assert not any(
        run(ClusterEvent(31, lost=1), ClusterEvent(33, lost=1), members=full, seed=seed).fallbacks for seed in range(20)
    )


def test_waiting_nodes_keep_their_state():
    events = ClusterEvent(31, lost=1), ClusterEvent(40, lost=2), ClusterEvent(60, gained=1)
    result = run(*events, members=four_nodes(settings=ElasticSettings(slots=4)))
    assert result.idle_s == 20 and not result.fallbacks and result.replayed == 0


def test_checkpoint_interval_follows_rate_of_fatal_losses():
    setup = dataclasses.replace(small_setup(pp=1), members=VaryingNodes(2, 4))
    whole_s = setup.total_iterations * setup.iteration_s

    def stored(*losses: int) -> SimulatedCosts:
        asked = dataclasses.replace(setup, elastic=ElasticSettings(slots=4, losses=losses))
        saving = POLICIES["elastic"](asked, Options(mtbf_s=900)).saving
        assert saving.beyond is not None and saving.per_iteration_s() == pytest.approx(saving.beyond.per_iteration_s())
        return saving.beyond

    survived, fatal, mixed = stored(1), stored(4), stored(1, 1, 1, 4)
    for found, mtbf_s in ((survived, whole_s), (fatal, 900), (mixed, 3600)):
        assert found.interval == pytest.approx((mtbf_s / 900) ** 0.5 * fatal.interval, rel=0.15)
    given = POLICIES["elastic"](setup, Options(interval=7)).saving.beyond
    assert given is not None and given.interval == 7
