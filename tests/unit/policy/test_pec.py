"""The policy ``pec``: who is saved when, in memory and in storage, and what it remembers."""

import json
import math
from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from moc.policy import Every, IntervalTuner, full_plan, policy_named
from moc.policy.pec import NOT_CHOSEN, Pec
from moc.policy.pec_selection import load_aware_experts, persist_selection
from moc.state.operators import Detail
from tests.cases import each_row
from tests.errors import raises
from tests.model_shape import ModelShape, model_operators
from tests.unit.policy.clock import Clock


def operators(layers=(0, 1, 1), experts=4):
    return model_operators(ModelShape(layers, 8, 16, 8, 8, 4, 100, num_experts=experts, expert_ffn_hidden_size=16))


def saved(plan, detail=Detail.FULL) -> dict[int, list[int]]:
    """The experts at a detail, by layer."""
    found = defaultdict(list)
    for name in plan.operators_at(detail):
        if ".expert." in name:
            found[int(name.split(".")[1])].append(int(name.split(".")[3]))
    return dict(found)


def take(policy, iteration, load=None):
    plan = policy.plan(iteration, load)
    policy.on_snapshot(plan, load)
    return plan


def persist(policy, iteration, load=None, published=True):
    """Takes a snapshot that goes to storage, too; returns its plan and the part in storage."""
    plan = policy.storage.plan(iteration, load)
    policy.on_snapshot(plan, load)
    part = policy.storage.part_of(plan)
    policy.storage.on_write_begun(part)
    policy.storage.on_write_ended(part, published)
    return plan, part


def test_first_snapshot_is_full_then_experts_rotate():
    policy = policy_named("pec")(operators(), Every(5))
    first, second, third = (take(policy, iteration) for iteration in (5, 10, 15))
    assert first == full_plan(policy, 5) and first.complete
    assert policy.plan(16) is None
    assert saved(second) == {1: [0], 2: [1]} and saved(third) == {1: [1], 2: [2]}
    others = [operator.name for operator in policy.operators if operator.kind != "expert"]
    for plan in (second, third):
        assert not plan.complete and set(others) < set(plan.operators)
        assert set(plan.operators.values()) == {Detail.FULL}


def test_planning_does_not_change_policy():
    policy = Pec(operators(), Every(1))
    assert policy.plan(1) == policy.plan(1) and policy.plan(2).complete
    policy.on_snapshot(policy.plan(1))
    assert policy.plan(2) == policy.plan(2) and not policy.plan(2).complete


def test_figure_4_rotation_is_reproduced():
    policy = Pec(operators((0, 1) * 4, experts=3), Every(1), ep=3)
    _, first, second = (saved(take(policy, iteration)) for iteration in (1, 2, 3))
    assert first == {1: [0], 3: [1], 5: [2], 7: [0]}
    assert second == {1: [1], 3: [2], 5: [0], 7: [1]}


def test_rotation_counts_snapshots_of_tuned_interval():
    tuner = IntervalTuner()
    clock, policy = Clock(tuner, stall_s=1.0), Pec(operators(experts=3), tuner)
    seen = []
    for iteration in range(1, 400):
        clock.run(1)
        plan = policy.plan(iteration)
        assert (plan is not None) == (iteration in clock.starts)
        if plan is not None:
            policy.on_snapshot(plan)
            seen.append(saved(plan)[1])
    assert len(seen) > 5 and seen[1:] == [[turn % 3] for turn in range(len(seen) - 1)]


@each_row("target", NOT_CHOSEN)
def test_target_selects_saved_state_of_other_experts(target):
    policy = Pec(operators(), Every(1), target=target)
    take(policy, 1)
    plan, rest = take(policy, 2), {"weights": Detail.MOMENTS, "optimizer": Detail.MASTER}.get(target)
    assert not plan.complete and saved(plan) == {1: [0], 2: [1]}
    if rest is None:
        assert plan.details == (Detail.FULL,)
    else:
        assert saved(plan, rest) == {1: [1, 2, 3], 2: [0, 2, 3]} and len(plan.operators) == len(policy.operators)
    names = [operator.name for operator in policy.operators]
    assert list(plan.operators) == sorted(plan.operators, key=names.index)


def test_all_experts_make_snapshot_complete():
    policy = Pec(operators(), Every(1), k=4)
    assert take(policy, 1).complete and take(policy, 2).complete
    dense = Pec(operators((0, 0)), Every(1))
    assert take(dense, 1) == full_plan(dense, 1) and take(dense, 2) == full_plan(dense, 2)


def test_load_aware_selection_takes_busiest_experts():
    policy = Pec(operators(), Every(1), k=2, selection="load_aware", ep=2)
    start = {1: [100, 0, 0, 90], 2: [7, 7, 7, 7]}
    assert take(policy, 1, start).complete
    # of what came after the first snapshot, not since training began
    then = {1: [101, 5, 9, 90], 2: [8, 9, 17, 8]}
    since = {1: [1, 5, 9, 0], 2: [1, 2, 10, 1]}
    assert saved(take(policy, 2, then)) == load_aware_experts(since, 2, 2) == {1: [1, 2], 2: [1, 2]}
    # these were saved: the others have more unsaved tokens now
    assert saved(policy.plan(3, then)) == {1: [0, 2], 2: [0, 3]}
    with raises("tokens-not-counted"):
        policy.plan(3)


@settings(deadline=None)
@given(st.data())
def test_every_expert_is_eventually_saved_in_both_tiers(data):
    """Also where the snapshots that go to storage would always see the same part of the rotation."""
    ep, per_rank = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    experts, every = ep * per_rank, data.draw(st.integers(1, 6))
    k = data.draw(st.integers(1, experts))
    k_persist = data.draw(st.integers(1, k))
    policy = Pec(operators((1, 1), experts), Every(1), k, k_persist, ep=ep, persist_every=every)
    rounds, period = -(-experts // k), experts // math.gcd(experts, k)
    waits = 2 * period * every * -(-experts // k_persist)  # snapshots, generously
    in_memory, in_storage = (dict.fromkeys(((at, e) for at in (0, 1) for e in range(experts)), 0) for _ in range(2))
    for number in range(2 * waits):
        if number % every == 0:
            plan, part = persist(policy, number + 1)
        else:
            plan, part = take(policy, number + 1), None
        in_memory |= {(layer, expert): number for layer, numbers in saved(plan).items() for expert in numbers}
        if part is not None:
            if number:
                assert part.operators.items() <= plan.operators.items()
                assert all(len(numbers) == k_persist for numbers in saved(part).values())
            in_storage |= {(layer, expert): number for layer, numbers in saved(part).items() for expert in numbers}
        # a snapshot for storage that lacks experts there takes these, and memory waits for as many snapshots
        starved = -(-rounds // every) if math.gcd(period, every) > 1 else 0
        assert number - min(in_memory.values()) < rounds + starved
        assert number - min(in_storage.values()) <= waits


def test_longest_waiting_experts_of_snapshot_go_to_storage():
    candidates, persisted = {0: [0, 1, 2, 3], 5: [0, 1, 2, 3]}, {0: [3, 1, 2, 1], 5: [0, 0, 0, 0]}
    # layer 0 takes one from each rank; of equals in layer 5 too, though all of rank 0 come first
    assert persist_selection(candidates, persisted, 2, 2) == {0: [1, 3], 5: [0, 2]}
    assert persist_selection({0: [0, 2]}, persisted, 1, 2) == {0: [2]}
    # who waits longest goes, though the rank has given one already
    assert persist_selection({0: [0], 5: [1, 2]}, {0: [0] * 4, 5: [9, 0, 5, 9]}, 1, 2) == {0: [0], 5: [1]}
    assert persist_selection({0: [0, 2]}, persisted, 3, 2) == {0: [0, 2]}


def test_equal_candidates_are_spread_over_ranks():
    candidates = {layer: range(8) for layer in range(6)}
    chosen = persist_selection(candidates, dict.fromkeys(candidates, [0] * 8), 1, 4)
    ranks = [expert // 2 for experts in chosen.values() for expert in experts]
    assert max(map(ranks.count, range(4))) - min(map(ranks.count, range(4))) <= 1


def test_storage_requires_complete_snapshot_first():
    policy = Pec(operators(), Every(1), k=2, k_persist=1)
    take(policy, 1)
    partial = take(policy, 2)
    with raises("storage-lacks-experts", "2"):
        policy.storage.part_of(partial)
    whole = full_plan(policy, 3)
    assert policy.storage.part_of(whole) == whole
    policy.storage.on_write_begun(whole)
    assert saved(policy.storage.part_of(partial)).keys() == {1, 2}
    assert [len(numbers) for numbers in saved(policy.storage.part_of(partial)).values()] == [1, 1]


def test_memory_may_contain_all_experts_and_storage_fewer():
    policy = Pec(operators(), Every(1), k=4, k_persist=1, target="optimizer")
    plan = take(policy, 1)
    policy.storage.on_write_begun(policy.storage.part_of(plan))
    part = policy.storage.part_of(take(policy, 2))
    assert not part.complete and [len(part.operators_at(d)) for d in (Detail.FULL, Detail.MASTER)] == [
        len(part.operators) - 6,
        6,
    ]


def test_complete_snapshot_follows_lost_memory():
    policy = Pec(operators(), Every(1))
    take(policy, 1)
    policy.recovery.on_resume(in_memory=False, in_storage=True)
    assert take(policy, 2).complete and not take(policy, 3).complete


def test_everything_is_stored_after_failed_first_write():
    policy = Pec(operators(), Every(1), 2, 1)
    first = take(policy, 1)
    policy.storage.on_write_begun(policy.storage.part_of(first))
    policy.storage.on_full_snapshot_lost()
    second = take(policy, 2)
    assert second.complete and policy.storage.part_of(second) is second
    policy.storage.on_write_begun(second)
    third = take(policy, 3)
    assert not third.complete and not policy.storage.part_of(third).complete


@settings(deadline=None)
@given(st.integers(0, 6), st.sampled_from(["sequential", "load_aware"]), st.data())
def test_resumed_policy_plans_as_uninterrupted_policy(snapshots, selection, data):
    def made():
        return Pec(operators(experts=5), Every(1), 3, 1, selection, plt_limit=0.04)

    def go_on(policy, first, loads):
        done = []
        for iteration, load in enumerate(loads, start=first):
            done.extend(persist(policy, iteration, load))
        return done

    rows = st.lists(st.integers(0, 99), min_size=5, max_size=5)
    loads = data.draw(st.lists(st.fixed_dictionaries({1: rows, 2: rows}), min_size=12, max_size=12))
    one, other = made(), made()
    go_on(one, 1, loads[:snapshots])
    one.recovery.on_recovery(data.draw(st.sampled_from([0.0, 0.011, 0.05])))
    other.loading(json.loads(json.dumps(one.state_dict())))()
    assert go_on(other, 20, loads[snapshots:]) == go_on(one, 20, loads[snapshots:])


def test_fault_without_loss_does_not_fix_k():
    policy = Pec(operators(experts=16), Every(1), k=4, plt_limit=0.05)
    policy.recovery.on_recovery(0.0)
    other = Pec(operators(experts=16), Every(1), k=1, plt_limit=0.05)
    other.loading(policy.state_dict())()
    assert other.k_to_persist == 1
    policy.recovery.on_recovery(0.04)
    raised, fixed = (Pec(operators(experts=16), Every(1), k=1, plt_limit=limit) for limit in (0.05, 0.0))
    for one in (raised, fixed):
        one.loading(policy.state_dict())()
    assert raised.k_to_persist == policy.k_to_persist > 4
    assert fixed.k_to_persist == 1  # a run without Dynamic-K has the K of its flags


def test_faults_raise_both_numbers():
    policy = Pec(operators(experts=16), Every(1), k=4, k_persist=1, plt_limit=0.05)  # five shares of one percent
    numbers = []
    for plt in (0.009, -0.5, 0.002, 0.01, 0.01, 0.01, 0.01):
        policy.recovery.on_recovery(plt)
        numbers.append((policy.k_to_snapshot, policy.k_to_persist))
    assert numbers == [(4, 1), (4, 1), (8, 2), (16, 4), (16, 8), (16, 16), (16, 16)]
    take(policy, 1)
    assert take(policy, 2).complete
    fixed = Pec(operators(experts=16), Every(1), k=4, k_persist=1)
    fixed.recovery.on_recovery(0.9)
    assert (fixed.k_to_snapshot, fixed.k_to_persist) == (4, 1)


@each_row(
    ("wrong", "code", "named"),
    [
        ({"k": 5}, "experts-per-snapshot-invalid", ["4 experts", "layer 1", " 5 "]),
        ({"k": 0}, "experts-per-snapshot-invalid", [" 0 "]),
        ({"k": 2, "k_persist": 3}, "experts-per-snapshot-invalid", [" 2 ", " 3 "]),
        ({"ep": 3}, "experts-not-divisible", ["ep = 3"]),
        ({"selection": "random"}, "value-not-a-choice", ["random"]),
        ({"target": "W"}, "value-not-a-choice", [" W."]),
        ({"target": "optimizer", "plt_limit": 0.0375}, "flag-has-no-effect", ["--pec-dynamic-k", "--pec-target"]),
        ({"persist_every": 0}, "interval-invalid", ["persist_every"]),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(wrong, code, named):
    with raises(code, *named):
        Pec(operators(), Every(1), **wrong)


@each_row("broken", [{}, {"based": True}, {"persisted": 3}], ids=str)
def test_invalid_saved_state_is_refused(broken):
    with raises("saved-state-invalid"):
        Pec(operators(), Every(1)).loading(broken)()


def test_storage_receives_everything_once_per_loss():
    policy = Pec(operators(), Every(1))
    everything = full_plan(policy, 1)
    assert policy.storage.needs(everything)
    policy.on_snapshot(everything)
    partial = policy.plan(2)
    assert not policy.storage.needs(partial)  # which is of no use there
    policy.storage.on_write_begun(everything)
    assert not policy.storage.needs(full_plan(policy, 2)) and not policy.storage.needs(partial)
    policy.storage.on_full_snapshot_lost()
    assert policy.plan(3).complete and policy.storage.needs(policy.plan(3))


@each_row("in_memory", [False, True])
@each_row("in_storage", [False, True])
def test_resumed_run_saves_experts_that_a_tier_lacks(in_memory, in_storage):
    policy = Pec(operators(), Every(1))
    policy.recovery.on_resume(in_memory, in_storage)
    assert policy.plan(5).complete == (not (in_memory and in_storage))
    assert policy.storage.needs(full_plan(policy, 5)) == (not in_storage)
