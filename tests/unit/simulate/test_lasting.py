"""How seldom an elastic job needs a checkpoint."""

import itertools
from math import prod

import pytest

from moc.runtime.seating import NodeCandidate, assign_nodes, partial_model_nodes, ready_copies
from moc.simulate.elastic import AT_ONCE, REGROUP_S, ElasticSettings, Lasting, loss_survival
from moc.simulate.live_costs import Running, SavedBytes
from moc.simulate.planner import PlanLimits, best_of, every_candidate
from tests.cases import each_row

TWO = ElasticSettings(slots=3, least=2, everywhere=0)
HOT = {0: [900, 40, 30, 30]}


def lasting(least: int, most: int, settings: ElasticSettings = TWO) -> Lasting:
    return Lasting(least, most, ranks=1, experts=4, settings=settings)


def test_losses_below_f_survive_with_riskiest_nodes():
    one, two, *_ = lasting(3, 6).survivals(HOT)
    assert one == 1.0 and two < 1.0
    assert lasting(3, 3).survivals(HOT)[1] == two  # more nodes survive no less
    assert lasting(6, 6).survivals(HOT)[1] > two


def test_second_lost_node_before_resume_needs_checkpoint():
    job, mtbf_s = lasting(3, 6), 3600.0
    again = REGROUP_S / mtbf_s
    two = job.survivals()[1]
    assert job.rarer(mtbf_s) == pytest.approx(1 / (again * (1 - two)), rel=0.05)
    assert job.rarer(100 * mtbf_s) > 50 * job.rarer(mtbf_s)
    assert job.rarer(REGROUP_S / 2) == pytest.approx(1.0)  # all are lost before any has gone on


def test_each_loss_needs_checkpoint_with_single_replicas():
    alone = lasting(2, 2, ElasticSettings(slots=2, least=1, everywhere=0))
    assert alone.survivals()[0] == 0.0 and alone.rarer(1e9) == pytest.approx(1.0)


def test_policy_with_localized_recovery_saves_less_often():
    run = Running("disk", 4, 1, SavedBytes(1e9, {1: 5e8, 4: 1e9}, []), 1.0, 0.8, copy_rate=5e8, write_rate=1e9)
    policies = ("full", "pec")
    usual, rarely = (PlanLimits(policies=policies, plt=1.0, rarer=rarer) for rarer in (1.0, lasting(3, 4).rarer(600.0)))
    before, after = (best_of(every_candidate(run, 600.0, limits), 1.0, 600.0, limits) for limits in (usual, rarely))
    assert before.best.saving.name == after.best.saving.name == "pec"
    assert after.best.saving.interval > 2 * before.best.saving.interval
    assert after.best.ettr > before.best.ettr


def likely(copies: int, lost: int, holders: int = 2) -> float:
    """A part in which so many nodes lost at once take something along, whichever they are."""
    return float(lost < min(holders, copies))


def choices(parts, nodes, lost, least):
    """As :func:`survival`, by trying each choice of lost nodes: seat i has part i, the last ones wait."""
    copies, found = nodes // len(parts), []
    for gone in itertools.combinations(range(nodes), lost):
        of_parts = [sum(n % len(parts) == part for n in gone if n < copies * len(parts)) for part in range(len(parts))]
        there = [NodeCandidate(n, n % len(parts), True) for n in range(copies * len(parts)) if n not in gone]
        there += [NodeCandidate(n) for n in range(copies * len(parts), nodes) if n not in gone]
        stay = {one.block: one.model_part for one in there}
        if len(there) >= least:
            whole, later = ready_copies(there, len(parts)), assign_nodes(there, len(parts), len(there) // len(parts))
            seated = later if whole < max(1, least // len(parts)) else assign_nodes(there, len(parts), whole)
            stay = {n: seat % len(parts) for seat, n in enumerate(seated)}
            stay |= {one.block: one.model_part for one in partial_model_nodes(there, len(parts), seated, later)}
        kept = [sum(one.model_part == part == stay.get(one.block) for one in there) for part in range(len(parts))]
        assert all(copies - left >= part for left, part in zip(kept, of_parts, strict=True))
        found.append(prod(part(copies, copies - left) for part, left in zip(parts, kept, strict=True)))
    return sum(found) / len(found)


@each_row(("count", "nodes", "least"), [(2, 4, 2), (2, 7, 4), (3, 8, 3), (3, 9, 6), (2, 6, 6)])
@each_row("lost", range(1, AT_ONCE + 1))
def test_model_parts_follow_controller_assignment(count, nodes, least, lost):
    def smoothly(copies, number):
        return (1 - number / copies) ** 2

    for part in (likely, smoothly):
        parts = [part] * count
        found, tried = loss_survival(parts, nodes, lost, least), choices(parts, nodes, lost, least)
        assert found == pytest.approx(tried) or (count > 2 and 0.95 * tried < found < tried)  # whose node moves is open


def test_node_brings_expert_only_if_its_part_has_no_holder():
    assert loss_survival([likely, likely], 4, 1, 2) == 1.0
    assert loss_survival([likely, likely], 4, 2, 2) == pytest.approx(4 / 6)  # one of each part: of 6 pairs, 4 are such
    assert loss_survival([likely, likely], 5, 1, 2) == 1.0  # one waits, and has nothing to lose
    assert loss_survival([likely, likely], 2, 1, 2) == 0.0  # a part is lost as a whole
    assert loss_survival([likely], 4, 1, 2) == 1.0 and loss_survival([likely], 4, 2, 2) == 0.0
    assert loss_survival([likely, likely], 2, 3, 2) == 0.0


def test_survival_of_two_node_model_matches_its_parts():
    """Of 6 nodes, 3 have each part, with its own plan for its own layers."""
    loads = HOT | {1: [10, 10, 10, 10], 2: [10, 40, 900, 10]}
    both = Lasting(6, 6, ranks=1, experts=4, settings=TWO, parts=((0, 1), (2,)))
    one, two, *_ = both.survivals(loads)
    assert one == 1.0 and lasting(3, 3).survivals(HOT)[1] < two < 1.0  # the second one lost may be of the other part
    assert both.rarer(3600.0, loads) > 10
    dense = Lasting(6, 6, ranks=1, experts=4, settings=TWO, parts=((0,), ()))
    assert dense.survivals(HOT)[1] > two
    assert Lasting(4, 6, 1, 4, TWO, ((0,), (1,))).survivals(HOT)[0] < 1.0  # 4 nodes hold no two of each
