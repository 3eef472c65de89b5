"""What workers agree on when they meet: who holds which expert, and where experts move."""

from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from moc.elastic.allocation import PlanSettings
from moc.elastic.plan import make_plan
from moc.elastic.transfers import expert_operator
from moc.session.resume.point import NoRecoveryPoint
from tests.unit.pretraining.flags import parse

FLAGS = "--elastic --elastic-slots 6 --calculate-per-token-loss --global-batch-size 12"


@pytest.fixture(scope="module")
def membership():
    from megatron.pretraining.process import cpu

    cpu.install()
    from megatron.pretraining.elastic import membership

    return membership


def plan_of(membership, workers, load=(1,) * 8, among=None):
    """The plan of workers, each a node; of the nodes numbered ``among``, if they are others than the first ones."""
    nodes = Nodes(tuple(among or range(workers)), 1)
    return membership.plans_for(parse(FLAGS, workers=4), {0: nodes}, dict.fromkeys(range(4), load))[0]


class Nodes(NamedTuple):
    """As of :mod:`megatron.pretraining.elastic.placement`, which is imported after megatron-core is mended."""

    members: tuple[int, ...]
    ranks: int


class Held(SimpleNamespace):
    """What the replicas of a worker are told to do."""

    def land(self, plan):
        self.landed = plan

    def take(self, plans, nodes):
        self.plans, self.nodes = plans, nodes


def settled(membership, monkeypatch, mine, told, awaited=None, places=(0, 1, 2, 3), trained=True):
    """Replicas of the first worker after it has settled, and what it has told; the others tell plans, or None."""
    config = parse(FLAGS, workers=4)
    held = Held(plans={0: mine}, awaited=awaited, target=None, loads={}, landed=None)
    others = [one if isinstance(one, tuple) else (one, None) for one in told]
    known = {plan.digest: plan.to_json() for plan in [mine, awaited, *(one for pair in others for one in pair)] if plan}
    answers = iter([lambda own: [own, *words], lambda own: [(known, {})] * (len(told) + 1)])
    words = [
        (place, 0, plan is not None, (plan or mine).digest, waits and waits.digest, False)
        for place, (plan, waits) in zip(places[1:], others, strict=False)
    ]
    monkeypatch.setattr(membership, "gather", lambda own: next(answers)(own))
    monkeypatch.setattr(membership, "rank_block", lambda: places[0])
    monkeypatch.setattr(membership.dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(membership.parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
    monkeypatch.setenv("MOC_PLACES", "9")
    return held, membership.settle(config, held, None, trained)


def test_plan_landed_on_one_worker_lands_on_all(membership, monkeypatch):
    before, after, later = (plan_of(membership, 3, load) for load in ([1] * 8, [900, *[1] * 7], [1, 900, *[1] * 6]))
    places = (0, 1, 2)
    held, _ = settled(membership, monkeypatch, before, [after, (after, later)], after, places)
    assert held.landed == held.plans[0] == after
    held, _ = settled(membership, monkeypatch, before, [before, before], after, places)
    assert held.landed is None and held.plans[0] == before
    held, _ = settled(membership, monkeypatch, after, [(before, after), after], None, places)
    assert held.landed is None and held.plans[0] == after
    held, told = settled(membership, monkeypatch, before, [after, after], None, places, trained=False)
    assert held.plans[0] == after and told.run_started  # a replacement takes over the plan
    assert held.target is None  # nobody left or came


def test_survivors_keep_state_and_send_experts(membership, monkeypatch):
    old = plan_of(membership, 4)
    held, told = settled(membership, monkeypatch, old, [old, old], places=(0, 2, 3))
    assert held.nodes[0].members == held.target[0].members == (0, 2, 3) and told.lost == ""
    assert [held.plans[0].experts_of(0, rank) for rank in range(3)] == [old.experts_of(0, rank) for rank in (0, 2, 3)]
    assert all(len(held.target[0].holders(layer, expert)) >= 2 for layer in range(4) for expert in range(8))


def test_joining_worker_holds_no_experts(membership, monkeypatch):
    old = plan_of(membership, 2, among=(0, 2))
    held, _ = settled(membership, monkeypatch, old, [None, old], places=(0, 1, 2))
    assert held.plans[0].experts_of(0, 1) == () and held.target[0].experts_of(0, 1)


def test_absent_worker_agrees_on_membership_history(membership, monkeypatch):
    old = plan_of(membership, 4)
    between = old.restricted_to((0, 1, 2), [True] * 3)
    one, _ = settled(membership, monkeypatch, old, [between], places=(0, 2))
    other, _ = settled(membership, monkeypatch, between, [old], places=(0, 2))
    assert one.plans == other.plans and one.target == other.target


def test_landed_layer_lands_again_with_survivors(membership, monkeypatch):
    before, after = plan_of(membership, 4), plan_of(membership, 4, [900, *[1] * 7])
    held, _ = settled(membership, monkeypatch, before, [after, (before, after)], after, places=(1, 2, 3))
    assert held.landed == held.plans[0] == after.restricted_to((1, 2, 3), [True] * 3)


def test_lost_experts_take_slots_without_moving_others(membership, monkeypatch):
    old = plan_of(membership, 4)
    layer0 = old.tables[0].copy()
    layer0[:2] = range(6)
    gone = replace(old, tables={**old.tables, 0: layer0})
    monkeypatch.setattr(membership, "exchange_group", lambda: None)
    held, told = settled(membership, monkeypatch, gone, [gone], places=(0, 1))
    lost, now = gone.restricted_to((0, 1), [True, True]).lost_experts((0, 1)), held.plans[0]
    assert told.lost.startswith("expert ") and "layer 1" in told.lost and told.experts == len(lost)
    assert held.target[0].members == (0, 1) and now.lost_experts((0, 1)) == ()
    assert told.missing_operators == {expert_operator(*one) for one in lost if one[1] in now.experts_of(one[0], 0)}
    for layer, expert in {(layer, expert) for layer in range(4) for expert in range(8)} - {*lost}:
        assert {*now.holders(layer, expert)} <= {*gone.holders(layer, expert)}  # no other expert has moved


def test_untrained_worker_built_for_others_starts_over(membership, monkeypatch):
    fresh = plan_of(membership, 3)
    held, told = settled(membership, monkeypatch, fresh, [None, None], places=(0, 2, 5), trained=False)
    assert held.plans[0] == replace(fresh, members=(0, 2, 5)) and not told.run_started
    taken_over = plan_of(membership, 3, [1, 900, *[1] * 6])  # from workers that had trained, and are gone
    for mine, places in ((fresh, (0, 2)), (taken_over, (0, 2, 5))):
        with pytest.raises(NoRecoveryPoint):
            settled(membership, monkeypatch, mine, [None] * (len(places) - 1), places=places, trained=False)


def test_fewer_replicas_than_wanted_are_reported(membership):
    loads = {0: [4, 3, 2, 1], 1: [1, 1, 1, 1]}
    tight, wide = (make_plan(range(3), loads, PlanSettings(slots, min_replicas=2)) for slots in (2, 3))
    counts = [membership.ReplicaCounts.of({0: plan}, 2) for plan in (wide, tight)]
    assert [(one.least, one.fewer, one.experts) for one in counts] == [(2, 0, 8), (1, 4, 8)]
    assert [one.sentence.startswith("WARNING") for one in counts] == [False, True]
