"""Chains for all operators: each has a base in every round, and gradients without a gap after it."""

import json
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from moc.policy import POLICIES, ObservedIteration, Transfer, check_plan
from moc.policy.flags import JobShape
from moc.policy.gradient import MAX_WINDOW, Gradient, shortest_window
from moc.policy.interval import BLOCK, WARM_UP
from moc.recovery.sources import MEMORY, STORAGE, AvailableCheckpoint, needed, recovery_paths
from moc.state.operators import Detail
from tests.cases import each_row
from tests.errors import raises
from tests.model_shape import ModelShape, model_operators

SHAPE = ModelShape((1, 0, 1), 8, 16, 8, 8, 4, 100, num_experts=4, expert_ffn_hidden_size=16)
OPERATORS = model_operators(SHAPE)
ROUTERS = [one.name for one in OPERATORS if one.kind == "router"]
OTHERS = [one.name for one in OPERATORS if one.kind != "router"]
WINDOWS, STAGES = st.integers(2, 12), st.sampled_from([(), (0, 0, 1), (0, 1, 2)])


def run(policy: Gradient, iterations) -> list:
    """The plans of some iterations, as training asks for them."""
    plans = []
    for iteration in iterations:
        plans.append(plan := policy.plan(iteration))
        if plan is not None:
            check_plan(policy, plan)
            policy.on_snapshot(plan)
    return plans


def kept(plan, tier: str = MEMORY) -> AvailableCheckpoint:
    """The checkpoint of a plan."""
    return AvailableCheckpoint(plan.iteration, tier, {n: d.value for n, d in plan.operators.items()}, plan.policy)


def asked(**flags) -> SimpleNamespace:
    """Snapshot flags."""
    usual = dict(ckpt_policy="gradient", ckpt_tier="memory", snapshot_interval="auto", gradient_window="auto")
    return SimpleNamespace(**(usual | dict(persist_interval=None, mtbf_s=1e5) | flags))


@settings(deadline=None)
@given(WINDOWS, STAGES)
def test_operator_is_full_once_per_round_else_gradients(window, stages):
    first, *plans = run(Gradient(OPERATORS, None, window=window, ep=2, stages=stages), range(1, 2 + 3 * window))
    assert first.complete and first.supersedes == 1
    for start in range(0, 3 * window, window):
        of_round = plans[start : start + window]
        assert {plan.since for plan in of_round} == {of_round[0].iteration}
        for name in OTHERS:
            details = [plan.operators[name] for plan in of_round]
            assert details.count(Detail.FULL) == 1 and details.count(Detail.GRAD) == window - 1
        assert all(plan.operators[name] is Detail.FULL for plan in of_round for name in ROUTERS)


@settings(deadline=None)
@given(WINDOWS, STAGES, st.integers(0, 30))
def test_unsuperseded_snapshots_lead_to_their_iteration(window, stages, more):
    plans = run(Gradient(OPERATORS, None, window=window, ep=2, stages=stages), range(5, 6 + more))
    last = plans[-1]
    held = [kept(plan) for plan in plans if plan.iteration >= last.supersedes]
    assert len(held) <= 2 * window - 1 and (more < 2 * window or len(held) <= window)
    way = next(recovery_paths(held, OPERATORS, exact=True))
    assert way.iteration == last.iteration and len(way.points) == 1
    for name in OTHERS:
        steps = [one.iteration for one in way.gradients.get(name, ())]
        base = way.sources[name, "master"].iteration
        assert steps == list(range(base + 1, last.iteration + 1))
    assert not more or {one.iteration for one in way.checkpoints()} == {one.iteration for one in held}
    without_one = [one for one in held if one.iteration != last.supersedes]
    assert next(recovery_paths(without_one, OPERATORS, exact=True), None) is None


def test_gap_ends_chain_and_recovery_uses_earlier_iteration():
    plans = run(Gradient(OPERATORS, None, window=3), range(1, 9))
    held = [kept(plan) for plan in plans if plan.iteration != 7]
    assert next(recovery_paths(held, OPERATORS, exact=True)).iteration == 6
    assert {one[0] for one in needed(held, OPERATORS, True, 1)} == {4, 5, 6, 8}


def test_stored_round_is_complete_only_at_its_end():
    policy, stored = Gradient(OPERATORS, None, window=3), []
    for iteration in range(1, 8):
        plan = policy.plan(iteration)
        if iteration >= 5:  # 2, 3, 4 and 5, 6, 7 are rounds
            stored.append(kept(policy.storage.part_of(plan), STORAGE))
            ways = [way.iteration for way in recovery_paths(stored, OPERATORS, exact=True)]
            assert ways == ([7] if iteration == 7 else [])
        policy.on_snapshot(plan)
    details = [one.operators for one in stored]
    assert all("grad" not in details[0].values() for _ in details)  # no gradient without its base
    assert set(details[2]) == {one.name for one in OPERATORS}


def test_full_snapshot_follows_skipped_or_lost_one():
    policy = Gradient(OPERATORS, None, window=4)
    run(policy, range(1, 5))
    assert policy.plan(6).complete and not policy.plan(5).complete
    policy.schedule.restart_window()
    assert policy.plan(5).complete


@settings(deadline=None)
@given(WINDOWS, st.integers(1, 20))
def test_state_survives_json(window, iterations):
    policy, other = (Gradient(OPERATORS, None, window=window) for _ in range(2))
    run(policy, range(1, 1 + iterations))
    other.loading(json.loads(json.dumps(policy.state_dict())))()
    following = range(1 + iterations, 30)
    assert run(policy, following) == run(other, following)
    with raises("saved-state-invalid"):
        other.loading({"window": 2})()
    with raises("saved-state-invalid"):
        other.loading(policy.state_dict() | {"bases": [1]})()


def test_base_turns_are_balanced_within_rank():
    experts = [one.name for one in OPERATORS if one.expert is not None and one.layer == 0]
    plans = run(Gradient(OPERATORS, None, window=2, ep=2), range(1, 4))[1:]
    for rank in (experts[:2], experts[2:]):
        assert [sum(plan.operators[name] is Detail.FULL for name in rank) for plan in plans] == [1, 1]


@each_row("hidden_s, window", [(1.0, 1), (0.9, 2), (0.67, 2), (0.6, 3), (0.5, 4), (0.42, 8), (0.1, MAX_WINDOW)])
def test_shortest_hidden_window_is_found(hidden_s, window):
    assert shortest_window(12.0, 4.0, hidden_s, 12.0) == window


def test_window_follows_measurements():
    policy = Gradient(OPERATORS, None)
    policy.on_sizes(lambda operators: {Detail.FULL: 12.0, Detail.GRAD: 4.0}[next(iter(operators.values()))])
    assert policy.plan(3) is None  # nothing is measured
    for _ in range(WARM_UP + BLOCK):
        policy.interval.observe(ObservedIteration(1.0, forward_backward_s=0.5, copied=Transfer(12, 1.0)))
    first, second = run(policy, (20, 21))
    assert first.complete and not second.complete
    assert policy.report.chosen() == {"gradient_window": 4.0} and policy.schedule.window_length == 4
    assert "1.2e-08 GB/s" in policy.report.reason() and "0.5 s" in policy.report.reason()


def test_window_of_one_saves_everything_each_time():
    plans = run(Gradient(OPERATORS, None, window=1), range(1, 5))
    assert all(plan.complete and plan.supersedes == plan.iteration for plan in plans)


def test_unsupported_settings_are_refused():
    assert list(POLICIES[Gradient.name].flags.conflicts_in(asked())) == []
    assert "--ckpt-tier memory" in str(
        next(POLICIES[Gradient.name].flags.unmet_requirements(asked(ckpt_tier="disk"), JobShape()))
    )
    assert "drop --elastic" in str(
        next(POLICIES[Gradient.name].flags.unmet_requirements(asked(), JobShape(is_elastic=True)))
    )
    assert "5th" in str(next(POLICIES[Gradient.name].flags.conflicts_in(asked(snapshot_interval="5"))))
    assert list(POLICIES[Gradient.name].flags.unmet_requirements(asked(), JobShape())) == []
    assert "--optimizer adam" in str(
        next(POLICIES[Gradient.name].flags.unmet_requirements(asked(), JobShape(optimizer="sgd")))
    )
    shared = next(POLICIES[Gradient.name].flags.unmet_requirements(asked(), JobShape(has_separate_experts=False)))
    assert "drop --moe-single-grouped-weight" in str(shared) and shared.code == "gradients-need-separate-experts"
    with raises("value-out-of-range", "-1"):
        Gradient(OPERATORS, None, window=-1)
