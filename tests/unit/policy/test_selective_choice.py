"""Budgets are told from the rank, and the node, that has the most to save."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moc.policy import POLICIES, Capability, Every, JobShape, ObservedIteration, Transfer, full_plan
from moc.policy.expert_selection import ExpertSizes, Preselection, count_fitting, count_limit, proportional
from moc.policy.interval import BLOCK, WARM_UP, IntervalTuner
from moc.policy.pec import PecState
from moc.policy.selective import Selective
from moc.policy.selective_choice import SelectiveTuner, chained_experts, experts_to_renew, gradient_chains
from moc.policy.selective_flags import FLAGS
from moc.policy.tokens_at_risk import equal_sizes, replay_chains
from moc.state.operators import Detail
from tests.cases import each_row
from tests.errors import raises
from tests.unit.policy.test_expert_selection import at_risk
from tests.unit.policy.test_pec import operators, take
from tests.unit.policy.test_selective import OPERATORS, ZEROS, based, measured

SIZES = ExpertSizes({0: 10}, {(1, 0): {0: 4}, (1, 1): {1: 8}, (2, 0): {1: 3, 2: 3}}, (0, 0, 1), 2)


def test_busiest_rank_has_most_dense_and_largest_expert():
    assert SIZES.busiest_rank == (0, 4)
    assert ExpertSizes({0: 10, 1: 7}, SIZES.experts).busiest_rank == (1, 8)


def test_smallest_budgets_fit_dense_state_and_one_expert():
    assert SIZES.least_rank_bytes == 10 + 4
    assert SIZES.least_node_bytes == 2 * (10 + 8)
    assert SIZES.full_bytes_by_rank == {0: 14, 1: 11, 2: 3}


def test_pec_state_starts_with_k_unset():
    assert PecState().k == 0


def test_equal_experts_fill_room_of_every_rank():
    sizes = ExpertSizes({}, {(1, number): {number % 2: 4} for number in range(6)})
    assert count_fitting({1: 6}, [sizes.rank_limit(8.0)]) == 4
    assert count_fitting({1: 6}, [sizes.rank_limit(8.0), sizes.total_limit(12)]) == 3


def observe(tuner, number=1, seconds=1.0, **seen):
    for _ in range(number):
        tuner.observe(ObservedIteration(2 * seconds, forward_backward_s=seconds, **seen))
    return tuner


def test_no_snapshot_is_due_before_measurements():
    tuner = observe(SelectiveTuner(), WARM_UP + BLOCK - 1)
    assert not tuner.is_due(14) and tuner.local_bytes is None and tuner.affordable_interval(9.0) == 1
    observe(tuner)
    assert tuner.is_due(15) and not tuner.is_due(0) and tuner.remote_bytes("peers") is None
    observe(tuner, snapshot_started=True, snapshot_pending=True)
    assert not tuner.is_due(16)
    observe(tuner, snapshot_pending=True, copied=Transfer(80.0, 2.0))
    assert tuner.is_due(17) and tuner.local_bytes == 40.0


def test_first_snapshot_without_cost_ends_wait_when_durable():
    tuner = observe(SelectiveTuner(), WARM_UP + BLOCK)
    observe(tuner, snapshot_started=True, snapshot_pending=True)
    assert not tuner.is_due(17)
    observe(tuner)
    assert tuner.is_due(18)


def test_every_nth_iteration_is_due():
    tuner = observe(SelectiveTuner(3), WARM_UP + BLOCK)
    assert [iteration for iteration in range(15, 25) if tuner.is_due(iteration)] == [15, 18, 21, 24]


def test_budgets_match_hidden_transfers():
    tuner = observe(SelectiveTuner(), WARM_UP + BLOCK, seconds=2.0)
    observe(tuner, seconds=2.0, copied=Transfer(80.0, 2.0), replicated=Transfer(30.0, 1.0), written=Transfer(7.0, 1.0))
    assert tuner.local_bytes == 80.0  # forward and backward
    assert (tuner.remote_bytes("peers"), tuner.remote_bytes("disk"), tuner.remote_bytes("memory")) == (
        120.0,
        28.0,
        None,
    )  # an iteration
    assert (
        tuner.affordable_interval(80.0) == 1 and tuner.affordable_interval(89.6) == 4
    )  # twice 0.24 s, of at most 3 % of 4 s
    assert tuner.affordable_bytes(80.0, 1) == 80.0  # 40 bytes per second, for 2 s, and 3 % of 16 s
    assert tuner.affordable_bytes(89.6, 4) == pytest.approx(80 + 40 * 0.48)


def test_gradients_that_delay_training_are_replaced_by_states():
    """The policy plans states from then on, also after a restart; a single late snapshot changes nothing."""
    tuner = observe(SelectiveTuner(), WARM_UP + BLOCK, seconds=1.0)  # iterations of 2 s
    policy = based(Selective(OPERATORS, tuner, tier="memory", gradients=True))
    observe(tuner, BLOCK // 2, gradients_s=0.5)
    observe(tuner, BLOCK - 1, gradients_s=0.03)
    assert tuner.are_gradients_hidden and policy.saves_gradients and "selective_gradients" not in policy.report.chosen()
    observe(tuner, BLOCK, gradients_s=0.05)
    assert tuner.gradients_s == 0.05 and not policy.saves_gradients
    assert policy.report.chosen()["selective_gradients"] == 0
    again = SelectiveTuner()
    again.load_state_dict(json.loads(json.dumps(tuner.state_dict())))
    assert not observe(again).are_gradients_hidden


def test_bubble_budget_matches_bubble_time():
    """By the estimate until they are timed; only what does not hide beside the computation either stalls training."""
    tuner = observe(SelectiveTuner(bubble_share=0.25), WARM_UP + BLOCK, seconds=2.0)
    observe(tuner, seconds=2.0, copied=Transfer(80.0, 2.0))
    assert tuner.local_bytes == 20.0
    assert tuner.affordable_interval(80.0) == 1 and tuner.affordable_interval(89.6) == 4
    observe(tuner, BLOCK, seconds=2.0, bubble_s=0.75)
    assert tuner.local_bytes == 30.0
    compute = SelectiveTuner()
    compute.load_state_dict(json.loads(json.dumps(tuner.state_dict())))
    assert compute.local_bytes == 80.0
    resumed = SelectiveTuner(bubble_share=0.25)
    resumed.load_state_dict(json.loads(json.dumps(tuner.state_dict())))
    assert resumed.local_bytes == 30.0


def test_budgets_follow_changes_of_ten_percent():
    tuner = observe(SelectiveTuner(), WARM_UP + BLOCK)
    observe(tuner, copied=Transfer(100.0, 1.0))
    observe(tuner, 5, copied=Transfer(105.0, 1.0))
    assert tuner.local_bytes == 100.0
    observe(tuner, BLOCK, copied=Transfer(120.0, 1.0))
    assert tuner.local_bytes == 112.5  # the first median that is a tenth away; 120 is not, from there


def test_resumed_run_has_same_budgets():
    tuner = observe(SelectiveTuner(), WARM_UP + BLOCK)
    observe(tuner, copied=Transfer(100.0, 1.0))
    observe(tuner, 5, copied=Transfer(105.0, 1.0))
    other = SelectiveTuner()
    other.load_state_dict(json.loads(json.dumps(tuner.state_dict())))
    assert other.local_bytes == 100.0 and other.is_due(1) and other.state_dict() == tuner.state_dict()


def test_other_tuner_state_is_ignored_damaged_is_refused():
    tuner = observe(SelectiveTuner(), WARM_UP + BLOCK, copied=Transfer(100.0, 1.0))
    state = tuner.state_dict()
    tuner.load_state_dict(IntervalTuner().state_dict() | {"copied": [[1.0, 2.0]]})
    assert tuner.local_bytes is None and not tuner.is_due(1)
    for damaged in ([], state | {"copied": 3}, state | {"faults": "many"}):
        with raises("saved-state-invalid"):
            tuner.load_state_dict(damaged)


FULL, GRAD = Detail.FULL, Detail.GRAD
FULL_BYTES, GRAD_BYTES = 12, 4


class Told:
    """Sizes: one rank with all experts, on one node."""

    nodes, replicas = (0,), 0

    def by_rank(self, plans):
        """As the sizes of a session."""
        each = {FULL: FULL_BYTES, GRAD: GRAD_BYTES}
        return {name: {0: sum(each[detail] for detail in plan.values())} for name, plan in plans.items()}


STATES = 2 * FULL_BYTES
"""Bytes of the state of an expert of each layer."""


def policy(**settings):
    found = Selective(OPERATORS, Every(1), gradients=True, score="tokens", **settings)
    found.on_sizes(Told())
    return based(found)


def details(plan) -> dict[str, set]:
    """Places of the experts in a plan, by detail."""
    found = {FULL: set(), GRAD: set()}
    for one in OPERATORS:
        if one.expert_id is not None and one.name in plan.operators:
            found[plan.operators[one.name]].add(one.expert_id)
    return found


def nbytes(plan) -> int:
    """Bytes of the experts in a plan."""
    found = details(plan)
    return FULL_BYTES * len(found[FULL]) + GRAD_BYTES * (len(found[GRAD]) + len(plan.compared))


def loads(*experts, before=ZEROS):
    """Tokens after an iteration that gave each expert of both layers so many."""
    return {layer: [a + b for a, b in zip(before[layer], experts, strict=True)] for layer in before}


def test_gradients_count_one_third_of_state_bytes():
    """The budget of one expert of each layer, 24 bytes, has room for the gradients of six of the eight."""
    one = policy(bytes=1 * STATES)
    plan = take(one, 2, loads(9, 5, 3, 1))
    assert one.report.gauges() | {"mlt": 0} == {"selective_experts": 3, "selective_gradients": 3, "mlt": 0}
    assert details(plan) == {FULL: set(), GRAD: {(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)}}
    assert nbytes(plan) == 2 * FULL_BYTES and not plan.complete


def test_expert_budget_counts_gradients_as_states():
    """Two of each layer, whether by gradients or by states."""
    one, load = policy(experts=2), ZEROS
    for iteration in range(2, 9):
        load = loads(9, 5, 3, 1, before=load)
        found = details(take(one, iteration, load))
        assert len(found[FULL]) + len(found[GRAD]) == 4
        assert one.report.gauges()["selective_experts"] == 2
    assert found[GRAD] and list(one.report.remarks())
    assert not list(policy(bytes=2 * STATES).report.remarks())


@each_row("fold", ["recovery", "peers"])
def test_all_experts_are_saved_while_bases_are_renewed(fold):
    """Gradients saved beside a state for comparison do not count as another expert."""
    one, load = policy(experts=4, max_age=3, fold=fold), ZEROS
    for iteration in range(2, 16):
        load = loads(9, 5, 3, 1, before=load)
        plan = take(one, iteration, load)
        found = details(plan)
        assert len(found[FULL]) + len(found[GRAD]) == 8
        assert (fold == "peers") or not plan.compared
    assert one.report.gauges()["mlt"] == 0


def test_byte_budget_below_one_expert_is_refused():
    assert policy(bytes=FULL_BYTES).limits()
    with raises("snapshot-budget-too-small", "--selective-bytes"):
        policy(bytes=FULL_BYTES - 1)


def test_expert_missing_in_previous_snapshot_needs_full_state():
    one = policy(bytes=1 * STATES)
    take(one, 2, first := loads(9, 5, 3, 1))
    plan = take(one, 3, loads(9, 5, 0, 200, before=first))  # two that were left out have the most to lose
    assert details(plan)[FULL] == {(0, 3), (1, 3)} and not details(plan)[GRAD]
    plan = one.plan(4, loads(18, 10, 3, 300, before=first))  # the others were left out by the snapshot before
    assert details(plan)[GRAD] == {(0, 3), (1, 3)}


def test_half_of_budget_renews_old_bases():
    one, load = policy(bytes=2 * STATES, max_age=3), ZEROS
    for iteration in (2, 3, 4):
        load = loads(1, 1, 1, 1, before=load)
        assert len(details(take(one, iteration, load))[GRAD]) == 8
    seen = set()
    for iteration in range(5, 9):
        load = loads(1, 1, 1, 1, before=load)
        found = details(take(one, iteration, load))
        assert len(found[FULL]) == 2 and len(found[GRAD]) == 6  # 24 bytes, and 24 for the gradients of the others
        seen |= found[FULL]
    assert len(seen) == 8
    limits, half = [count_limit([(0, 0), (0, 1)], 4)], Preselection(share=0.5)
    assert experts_to_renew({0: [5, 8]}, [(0, 0), (0, 1)], 10, 3, limits, half) == {(0, 0)}
    assert experts_to_renew({0: [5, 4]}, [(0, 0), (0, 1)], 10, 3, limits, Preselection(share=0.25)) == {(0, 1)}


def test_every_rule_saves_gradients_within_budget():
    one = policy(bytes=1 * STATES, rule="proportional")
    plan = take(one, 2, loads(9, 5, 3, 1))
    assert len(details(plan)[GRAD]) > 2 and nbytes(plan) <= 2 * FULL_BYTES


def test_experts_are_chosen_by_loss_per_byte():
    """Gradients with 4 tokens to lose, at a third of the bytes, come before a state with 10."""
    one = policy(bytes=1 * STATES)
    take(one, 2, first := {0: [9, 9, 9, 0], 1: [9, 9, 9, 0]})  # the last one of each layer is left out
    load = {0: [9 + 4, 9 + 4, 9 + 4, 10], 1: [9 + 4, 9 + 4, 9 + 4, 10]}
    assert details(one.plan(3, load)) == {FULL: set(), GRAD: {(layer, e) for layer in first for e in (0, 1, 2)}}
    load = {layer: [*row[:3], 13] for layer, row in load.items()}
    assert details(one.plan(3, load))[FULL] == {(0, 3), (1, 3)}


@each_row("budget", [dict(local_gb=4 * 12e-9), dict(remote_gb=4 * 12e-9, tier="peers")])
def test_gradients_need_less_room_than_states(budget):
    one = Selective(OPERATORS, Every(1), gradients=True, score="tokens", **budget)
    told = Told()
    told.by_rank = lambda plans: {  # no dense operators
        name: {0: sum({FULL: FULL_BYTES, GRAD: GRAD_BYTES}[detail] for detail in plan.values())} if name else {}
        for name, plan in plans.items()
    }
    one.on_sizes(told)
    measured(based(one), copied=(1e9, 1.0), replicated=(1e9, 1.0))
    assert len(details(one.plan(2, loads(9, 5, 3, 1)).remote_plan)[GRAD]) == 8
    one.recovery.on_resume(in_memory=True, in_storage=True)
    assert len(details(one.plan(2, loads(9, 5, 3, 1)).remote_plan)[FULL]) == 4


def test_storage_gets_only_states_and_chains_continue():
    one = policy(bytes=2 * STATES)
    one.storage.on_write_begun(full_plan(one, 1))
    one.storage.on_write_ended(full_plan(one, 1), committed=True)
    load = ZEROS
    for iteration in (2, 3):
        load = loads(9, 5, 3, 1, before=load)
        assert not details(take(one, iteration, load))[FULL]
    plan = one.storage.plan(4, loads(9, 5, 3, 1, before=load))  # goes to storage, on half of the budget
    assert details(plan) == {FULL: {(0, 0), (1, 0)}, GRAD: {(layer, e) for layer in (0, 1) for e in (1, 2, 3)}}
    stored = one.storage.part_of(plan)
    assert set(stored.operators.values()) == {FULL} and stored.operators.items() < plan.operators.items()


def test_chain_ends_at_recovery_or_gap():
    one = policy(bytes=2 * STATES)
    take(one, 2, loads(1, 1, 1, 1))
    assert not details(one.plan(4, loads(3, 3, 3, 3)))[GRAD]
    one.recovery.on_resume(in_memory=True, in_storage=True)
    plan = one.plan(3, loads(2, 2, 2, 2))
    assert details(plan)[FULL] and not details(plan)[GRAD]


def test_order_continues_after_previous_snapshot():
    chains = gradient_chains({0: [3, 0, 5]}, {0: [7, 8, 6]})
    assert chains == {(0, 0): (3, 7), (0, 2): (5, 6)}
    assert chained_experts(chains, 8) == {(0, 0)}


def test_selective_fold_compares_experts_with_next_base():
    one, load = policy(bytes=3 * STATES, max_age=3, fold="peers"), ZEROS
    for iteration in range(2, 8):
        load = loads(9, 5, 3, 1, before=load)
        plan = take(one, iteration, load)
        if iteration == 5:  # the first with bases that are too old, on half of the budget
            assert (
                plan.compared
                == set(plan.operators_at(FULL)) - {o.name for o in OPERATORS if o.expert_id is None}
                != set()
            )
            assert not policy(bytes=3 * STATES, max_age=3).plan(5, load).compared
        assert iteration >= 5 or not plan.compared


@given(
    st.lists(st.lists(st.integers(0, 99), min_size=4, max_size=4), min_size=1, max_size=8),
    st.integers(1, 3),
    st.sampled_from(["recovery", "peers"]),
)
def test_gradient_plan_has_unbroken_chain(rows, experts, fold):
    """Recounted from the plans alone; and what the policy was told survives JSON."""
    one, load, plans = policy(bytes=experts * STATES, max_age=4, fold=fold), ZEROS, {1: full_plan(policy(), 1)}
    for iteration, row in enumerate(rows, start=2):
        load = loads(*row, before=load)
        other = Selective(
            OPERATORS, Every(1), gradients=True, score="tokens", bytes=experts * STATES, max_age=4, fold=fold
        )
        other.on_sizes(Told())
        other.loading(json.loads(json.dumps(one.state_dict())))()
        plans[iteration] = take(one, iteration, load)
        assert nbytes(plans[iteration]) <= 2 * experts * FULL_BYTES
        assert other.plan(iteration, load) == plans[iteration]
        for name in (*plans[iteration].operators_at(GRAD), *plans[iteration].compared):
            assert name in plans[iteration - 1].operators
        for name in plans[iteration].operators_at(GRAD):
            at = iteration
            while plans[at].operators.get(name) is GRAD:
                at -= 1
            assert plans[at].operators.get(name) is FULL


def asked(**flags) -> SimpleNamespace:
    defaults = {flag.name: flag.default for flag in FLAGS}
    others = dict(ckpt_tier="peers", persist_interval=None, snapshot_interval="auto", mtbf_s=1.0)
    return SimpleNamespace(**(others | defaults | flags))


OBSTACLES = [
    (dict(ckpt_tier="disk"), {}, "add --ckpt-tier memory or peers"),
    (dict(ckpt_tier="disk"), dict(is_elastic=True), "drop --elastic"),
    (dict(snapshot_interval="2"), {}, "set --snapshot-interval 1"),
    ({}, dict(optimizer="sgd"), "--optimizer adam"),
    ({}, dict(has_separate_experts=False), "drop --moe-single-grouped-weight"),
]


@each_row(("flags", "job", "remedy"), OBSTACLES)
def test_unsupported_gradients_are_off_and_refused_if_requested(flags, job, remedy):
    settings = POLICIES[Selective.name].settings(asked(**flags), JobShape(**job))
    found = Selective(OPERATORS, Every(1), **settings)
    assert Capability.GRADIENTS not in found.requires and found.score == "tokens-age"
    assert remedy in next(found.report.remarks())
    wanted = asked(**flags, selective_gradients="on")
    (sentence,) = POLICIES[Selective.name].flags.unmet_requirements(wanted, JobShape(**job))
    assert remedy in str(sentence)
    folded = asked(**flags, selective_fold="peers")
    (sentence,) = POLICIES[Selective.name].flags.unmet_requirements(folded, JobShape(**job))
    assert remedy in str(sentence) and "--selective-fold peers" in str(sentence)


def test_selective_fold_without_gradients_is_refused():
    (sentence,) = POLICIES[Selective.name].flags.conflicts_in(asked(selective_fold="peers", selective_gradients="off"))
    assert "--selective-fold peers" in str(sentence) and "--selective-gradients off" in str(sentence)
    assert not [
        *POLICIES[Selective.name].flags.conflicts_in(asked(selective_fold="peers")),
        *POLICIES[Selective.name].flags.unmet_requirements(asked(), JobShape()),
    ]
    assert (
        Capability.BACKGROUND_UPDATES
        in Selective(
            OPERATORS, Every(1), **POLICIES[Selective.name].settings(asked(selective_fold="peers"), JobShape())
        ).requires
    )
    assert (
        Capability.BACKGROUND_UPDATES
        not in Selective(OPERATORS, Every(1), **POLICIES[Selective.name].settings(asked(), JobShape())).requires
    )


def test_gradients_are_on_by_default_where_supported():
    found = Selective(OPERATORS, Every(1), **POLICIES[Selective.name].settings(asked(), JobShape()))
    assert Capability.GRADIENTS in found.requires and found.score == "tokens" and not list(found.report.remarks())
    assert not [
        *POLICIES[Selective.name].flags.conflicts_in(asked()),
        *POLICIES[Selective.name].flags.unmet_requirements(asked(), JobShape()),
    ]
    off = Selective(
        OPERATORS, Every(1), **POLICIES[Selective.name].settings(asked(selective_gradients="off"), JobShape())
    )
    assert Capability.GRADIENTS not in off.requires and off.score == "tokens-age" and not list(off.report.remarks())


@each_row(("experts", "risk"), [(4, 0.51), (8, 0.005)])
def test_gradients_risk_fewest_tokens_on_recorded_loads(trace, experts, risk):
    layers, width = len(trace[0]), len(trace[0][0])
    model = operators((1,) * layers, experts=width)
    one = Selective(model, Every(1), gradients=True, score="tokens", bytes=experts * layers * FULL_BYTES)
    one.on_sizes(Told())
    load, found, shares = {layer: [0] * width for layer in range(layers)}, [], []
    based(one, load=load)
    for iteration, row in enumerate(trace, start=2):
        load = {layer: [a + b for a, b in zip(load[layer], tokens, strict=True)] for layer, tokens in enumerate(row)}
        take(one, iteration, load)
        found.append(one.state.mlt)
        shares.append(one.report.gauges())
    assert sum(found[10:]) / len(found[10:]) == pytest.approx(risk, rel=0.1)
    sizes = one.sizes[0]
    foretold = replay_chains(
        [dict(enumerate(row)) for row in trace],
        [sizes.total_limit(experts * layers * sizes.largest_expert)],
        sizes,
        one.max_expert_age,
        10,
    )
    assert foretold.risk.mlt_per_layer == pytest.approx(sum(found[10:]) / len(found[10:]), rel=0.02)
    saved, gradients = (sum(one[f"selective_{name}"] for one in shares[10:]) for name in ("experts", "gradients"))
    assert foretold.experts == pytest.approx(saved / len(shares[10:]))
    assert foretold.gradients == pytest.approx(gradients / saved)


def test_last_fifth_of_loads_has_low_risk_with_gradients(trace):
    """Less than 0.3 of what Algorithm 1 leaves at the same bytes, in a run under way."""
    skip, experts = len(trace) - len(trace) // 5, 4
    sizes = equal_sizes(dict(enumerate(trace[0])), 1 / 3)
    limits = [sizes.total_limit(experts * len(trace[0]) * sizes.largest_expert)]
    found = replay_chains([dict(enumerate(row)) for row in trace], limits, sizes, 4 * (32 // experts), skip)
    by_rule = at_risk(trace, experts, lambda unsaved, _, most: proportional(unsaved, most), skip)
    assert found.risk.mlt_per_layer < 0.3 * by_rule
