"""The sparse policy over a run: windows, orders, what changes them, and what is told and stored."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from moc.policy import ObservedIteration, Transfer, full_plan
from moc.policy.interval import BLOCK, WARM_UP
from moc.policy.sparse import ORDERS, Sparse
from moc.state.operators import Detail
from tests.cases import each_row
from tests.errors import raises
from tests.model_shape import ModelShape, model_operators

SHAPE = ModelShape((1, 0, 1), 8, 16, 8, 8, 4, 100, num_experts=4, expert_ffn_hidden_size=16)
OPERATORS = model_operators(SHAPE)
NAMES = [operator.name for operator in OPERATORS]
FLAT = {0: [1, 1, 1, 1], 2: [1, 1, 1, 1]}


def run(policy: Sparse, iterations, loads=lambda iteration: None) -> list:
    """The plans of some iterations, as training asks for them."""
    plans = []
    for iteration in iterations:
        plan = policy.plan(iteration, loads(iteration))
        if plan is not None:
            policy.on_snapshot(plan, loads(iteration))
        plans.append(plan)
    return plans


def grown(per_iteration: dict) -> callable:
    """Loads of a run in which experts get as much in every iteration."""
    return lambda iteration: {layer: [n * iteration for n in row] for layer, row in per_iteration.items()}


def check_window(plans) -> None:
    """Each operator in full once; compute weights before it, and nothing after it."""
    for name in NAMES:
        details = [plan.operators.get(name) for plan in plans]
        place = details.index(Detail.FULL)
        assert details == [Detail.COMPUTE] * place + [Detail.FULL] + [None] * (len(plans) - place - 1), name


@settings(deadline=None)
@given(st.integers(1, 20), st.sampled_from(ORDERS), st.sampled_from([(), (0, 0, 1), (0, 1, 2)]), st.randoms())
def test_every_window_contains_every_operator(window, order, stages, random):
    policy = Sparse(OPERATORS, None, window=window, order=order, ep=2, stages=stages)
    tokens, loads = {0: [0] * 4, 2: [0] * 4}, {}
    for iteration in range(1, 41):
        if iteration % 7 == 0:
            add = {layer: [random.randrange(10) for _ in range(4)] for layer in tokens}
            tokens = {layer: [a + b for a, b in zip(row, add[layer], strict=True)] for layer, row in tokens.items()}
        loads[iteration] = tokens
    first, *plans = run(policy, range(1, 41), loads.get)
    length = len(policy.state.current.turns)
    assert first.complete and length <= window  # of everything, so that there is something to go on from
    for start in range(0, 39 - length + 1, length):
        check_window(plans[start : start + length])
    assert all(plan.complete == (length == 1) for plan in plans)


def test_planning_does_not_change_policy():
    policy = Sparse(OPERATORS, None, window=3)
    run(policy, range(1, 4), grown(FLAT))
    before = json.dumps(policy.state_dict())
    assert policy.plan(4, {0: [9, 1, 1, 1], 2: [1, 1, 1, 9]}) == policy.plan(4, {0: [9, 1, 1, 1], 2: [1, 1, 1, 9]})
    assert json.dumps(policy.state_dict()) == before


def first_experts(policy, iteration, load) -> list[str]:
    return [name for name in policy.plan(iteration, load).operators_at(Detail.FULL) if ".expert." in name]


def test_order_follows_popularity_between_windows():
    policy = Sparse(OPERATORS, None, window=9)
    run(policy, range(1, 10), grown({0: [4, 3, 2, 1], 2: [1, 2, 3, 4]}))
    assert policy.state.current.turns[0].full[:2] == ("layers.0.expert.3", "layers.2.expert.0")
    turns = policy.state.current.turns
    run(policy, [10], grown({0: [1, 3, 2, 40], 2: [40, 2, 3, 4]}))
    assert policy.state.current.turns == turns
    run(policy, [11], grown({0: [1, 3, 2, 40], 2: [40, 2, 3, 4]}))
    assert policy.state.current.start == 11 and policy.state.current.turns[0].full[:2] != turns[0].full[:2]
    assert policy.state.current.turns[0].full[0] == "layers.0.expert.0"


def test_small_load_change_keeps_order():
    policy = Sparse(OPERATORS, None, window=1)
    run(policy, [1], grown({0: [100, 101, 102, 103], 2: [103, 102, 101, 100]}))
    order = policy.state.current.order
    run(policy, [2], grown({0: [103, 102, 101, 100], 2: [100, 101, 102, 103]}))
    assert policy.state.current.order == order
    run(policy, [3], grown({0: [200, 102, 101, 100], 2: [100, 101, 102, 200]}))
    assert policy.state.current.order != order


def test_orders_use_different_measures():
    def least(order, **more):
        policy = Sparse(OPERATORS, None, window=len(OPERATORS), order=order, **more)
        policy.on_routing({0: [9, 9, 1, 9], 2: [9, 9, 9, 9]})
        loads = {1: {0: [90, 50, 60, 70], 2: [99] * 4}, 2: {0: [91, 150, 160, 170], 2: [199] * 4}}
        run(policy, [1], loads.get)
        return first_experts(policy, 2, loads[2])[0]

    assert least("popularity") == "layers.0.expert.0"
    assert least("decayed") == "layers.0.expert.0"
    assert least("soft") == "layers.0.expert.2"
    assert least("index") == "layers.0.expert.0"
    assert least("capacity", capacities={0: (1, 1, 1, 10), 2: (1,) * 4}) == "layers.0.expert.3"


def test_only_decayed_popularity_forgets_old_tokens():
    early, late = {0: [1000, 0, 5, 5], 2: [5] * 4}, {0: [0, 30, 5, 5], 2: [5] * 4}

    def loads(iteration):
        first, then = min(iteration, 10), max(0, iteration - 10)
        return {k: [a * first + b * then for a, b in zip(early[k], late[k], strict=True)] for k in early}

    def most(order):
        policy = Sparse(OPERATORS, None, window=1, order=order)
        run(policy, range(1, 101), loads)
        ranked = [OPERATORS[place].name for place in policy.state.current.order]
        return [name for name in ranked if name.startswith("layers.0.expert.")][-1]

    assert most("popularity") == "layers.0.expert.0" and most("decayed") == "layers.0.expert.1"


def test_run_resumed_after_window_keeps_its_plan():
    loads = grown({0: [4, 3, 2, 1], 2: [1, 2, 3, 40]})
    for order in ORDERS:
        straight, first = (Sparse(OPERATORS, None, window=3, order=order) for _ in range(2))
        plans = run(straight, range(1, 13), loads)
        run(first, range(1, 8), loads)
        other = Sparse(OPERATORS, None, window=3, order=order)
        other.loading(json.loads(json.dumps(first.state_dict())))()
        assert run(other, range(8, 13), loads) == plans[7:]


@each_row("at", [5, 6, 7, 8])
def test_resume_within_window_takes_next_step(at):
    loads = grown({0: [4, 3, 2, 1], 2: [1, 2, 3, 40]})
    straight, first = (Sparse(OPERATORS, None, window=3, stages=(0, 0, 1)) for _ in range(2))
    plans = run(straight, range(1, 13), loads)
    run(first, range(1, at + 1), loads)
    other = Sparse(OPERATORS, None, window=3, stages=(0, 0, 1))
    other.loading(json.loads(json.dumps(first.state_dict())))()
    start = 5 if at < 8 else 8
    window = other.schedule.current_window(at)
    assert list(window) == plans[start - 1 : at] and {plan.since for plan in window} == {start}
    assert other.schedule.current_window(at + 1) == ()  # which it was not told of
    assert run(other, range(at + 1, 13), loads) == plans[at:]


def test_window_can_restart():
    policy = Sparse(OPERATORS, None, window=3)
    run(policy, range(1, 7))
    order = policy.state.current.order
    policy.schedule.restart_window()
    assert policy.schedule.current_window(6) == () and policy.state.current.order == order
    plans = run(policy, range(7, 10))
    assert [plan.since for plan in plans] == [7] * 3
    check_window(plans)


def test_finished_window_stays_finished_in_other_layout():
    one, other = Sparse(OPERATORS, None, window=6, stages=(0, 0, 1)), Sparse(OPERATORS, None, window=6)
    run(one, range(1, 6))
    assert one.schedule.window_length == 5 and one.state.current.start == 2
    other.loading(json.loads(json.dumps(one.state_dict())))()
    plans = run(other, range(6, 12))
    assert other.schedule.window_length == 6
    check_window(plans)


def test_last_snapshot_of_window_supersedes_earlier():
    plans = run(Sparse(OPERATORS, None, window=3), range(1, 8))
    assert [plan.supersedes for plan in plans] == [1, None, None, 2, None, None, 5]


def test_complete_snapshot_ends_window():
    policy = Sparse(OPERATORS, None, window=4)
    run(policy, range(1, 4))
    policy.on_snapshot(full_plan(policy, 3))
    other = Sparse(OPERATORS, None, window=4)
    other.loading(json.loads(json.dumps(policy.state_dict())))()
    assert policy.schedule.window_length == other.schedule.window_length == 1
    check_window(run(policy, range(4, 8)))
    check_window(run(other, range(4, 8)))


@each_row("state", [{}, {"order": 3}, [], {"order": ["x"], "shares": {}}])
def test_invalid_saved_state_is_refused(state):
    with raises("saved-state-invalid"):
        Sparse(OPERATORS, None).loading(state)()


@each_row(("bad", "code"), [(dict(window=-1), "value-out-of-range"), (dict(order="luck"), "value-not-a-choice")])
def test_impossible_settings_are_refused(bad, code):
    with raises(code, str(*bad.values())):
        Sparse(OPERATORS, None, **bad)


def busiest(operators) -> int:
    """A rank that saves 12 bytes of each parameter in full, and 2 of each compute weight."""
    size = {operator.name: operator.parameters for operator in OPERATORS}
    return sum(size[name] * (12 if detail is Detail.FULL else 2) for name, detail in operators.items())


def measured(policy: Sparse, seconds: float, bandwidth: float, iterations: int) -> list[bool]:
    """By iteration, whether there was a snapshot; those are copied by the next iteration."""
    taken = []
    for iteration in range(1, iterations + 1):
        plan = policy.plan(iteration)
        if plan is not None:
            policy.on_snapshot(plan)
        amount = 0 if plan is None else busiest(plan.operators)
        copied = Transfer(amount, amount / bandwidth)
        policy.interval.observe(ObservedIteration(2 * seconds, forward_backward_s=seconds, copied=copied))
        taken.append(plan is not None)
    return taken


def test_window_length_auto_follows_measurements():
    policy, dense = Sparse(OPERATORS, None), busiest(dict.fromkeys(NAMES, Detail.FULL))
    policy.on_sizes(busiest)
    taken = measured(policy, seconds=1.0, bandwidth=dense / 2, iterations=40)
    assert taken == [False] * (WARM_UP + BLOCK) + [True] * (40 - WARM_UP - BLOCK)
    length = policy.report.gauges()["sparse_window"]
    assert length > 1 and "GB/s" in policy.report.reason()
    plans = run(policy, range(41, 41 + 2 * length))
    assert max(busiest(plan.operators) for plan in plans) <= dense / 2
    other = Sparse(OPERATORS, None)
    other.on_sizes(busiest)
    other.interval.load_state_dict(json.loads(json.dumps(policy.interval.state_dict())))
    other.loading(json.loads(json.dumps(policy.state_dict())))()
    assert other.plan(1) is not None and not other.plan(1).complete


def test_fast_machine_saves_everything_each_time():
    policy = Sparse(OPERATORS, None)
    policy.on_sizes(busiest)
    measured(policy, seconds=1.0, bandwidth=1e12, iterations=30)
    assert policy.report.gauges()["sparse_window"] == 1 and policy.plan(31).complete


def test_gauges_show_recent_expert_imbalance():
    policy = Sparse(OPERATORS, None, window=2)
    assert policy.report.gauges() == {}
    loads = {1: {0: [4, 4, 4, 4], 2: [4, 4, 4, 4]}, 2: {0: [8, 4, 4, 4], 2: [5, 5, 5, 5]}}
    run(policy, [1, 2], loads.get)
    assert policy.report.gauges() == {"sparse_window": 2, "hhi": (1 + 0.25) / 2, "skewness": 0.5}
    assert policy.report.reason() is None


def test_iteration_tokens_are_mean_since_last_snapshot():
    policy = Sparse(OPERATORS, None, window=1, order="decayed", alpha=0.75)
    policy.on_snapshot(full_plan(policy, 2), {0: [6, 2, 0, 0], 2: [2, 2, 2, 2]})
    assert policy.report.gauges() == {"sparse_window": 1, "hhi": (10 / 16 + 1 / 4) / 2, "skewness": 0.25}
    assert policy.state_dict()["counts"] == {0: [3.0, 1.0, 0.0, 0.0], 2: [1.0] * 4}
    policy.on_snapshot(full_plan(policy, 6), {0: [10, 2, 8, 0], 2: [2, 2, 2, 2]})
    assert policy.state_dict()["counts"] == {0: [1.0, 0.0, 2.0, 0.0], 2: [0.0] * 4}
    assert policy.state_dict()["mean"] == {0: [0.8125, 0.1875, 0.5, 0.0], 2: [0.1875] * 4}
    policy.on_snapshot(full_plan(policy, 6), {0: [11, 2, 8, 0], 2: [2, 2, 2, 2]})  # once more, at the end of the run
    assert policy.state_dict()["counts"][0] == [1.0, 0.0, 0.0, 0.0]
