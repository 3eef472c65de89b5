"""The policy ``selective``: what a snapshot holds, by which budgets, and what the policy remembers."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moc.policy import (
    POLICIES,
    Capability,
    Every,
    IntervalTuner,
    JobShape,
    ObservedIteration,
    Transfer,
    full_plan,
    policy_named,
)
from moc.policy.costs import Machine, SnapshotSizes
from moc.policy.expert_selection import ExpertSizes
from moc.policy.interval import BLOCK, WARM_UP
from moc.policy.selective import Selective
from moc.policy.selective_choice import SelectiveTuner
from moc.policy.selective_flags import FLAGS
from moc.policy.token_ledger import CapacityBoost
from moc.state.operators import Detail
from tests.cases import each_row
from tests.errors import raises
from tests.unit.policy.test_pec import operators, persist, saved, take

OPERATORS = operators((1, 1), experts=4)
DENSE = [one.name for one in OPERATORS if one.expert is None]
ZEROS = {0: [0] * 4, 1: [0] * 4}
GB = 10**9


class Told:
    """Sizes of snapshots: two ranks on two nodes, each with two experts of each layer, of so many bytes."""

    nodes, replicas = (0, 1), 1

    def __init__(self, dense=100, expert=10):
        self._dense, self._expert = dense, expert

    def by_rank(self, plans):
        """As the sizes of a session."""
        found = {}
        for name, plan in plans.items():
            numbers = {int(operator.split(".")[3]) for operator in plan if ".expert." in operator}
            found[name] = {number // 2: self._expert for number in numbers} or {0: self._dense, 1: self._dense}
        return found


def measured(policy, copied=(0.0, 0.0), replicated=(0.0, 0.0), written=(0.0, 0.0), iterations=WARM_UP + BLOCK):
    """Feeds a policy iterations of 2 s, half of them before the update; transfers in bytes and seconds."""
    for number in range(iterations):
        moved = zip(("copied", "replicated", "written"), (copied, replicated, written), strict=True)
        seen = {name: Transfer(*transfer) for name, transfer in moved if number == iterations - 1}
        policy.interval.observe(ObservedIteration(2.0, forward_backward_s=1.0, **seen))
    return policy


def based(policy, iteration=1, load=ZEROS):
    policy.on_snapshot(full_plan(policy, iteration), load)
    return policy


def test_later_snapshots_have_dense_and_riskiest_experts():
    policy = Selective(OPERATORS, Every(1), experts=1)
    assert policy.plan(1, ZEROS).complete
    load = {0: [5, 9, 0, 1], 1: [1, 1, 1, 1]}
    plan = take(based(policy), 2, load)
    assert saved(plan) == {0: [0, 1]} and not plan.complete  # of both layers, two experts
    assert set(DENSE) < set(plan.operators) and set(plan.operators.values()) == {Detail.FULL}
    assert saved(take(policy, 3, {0: [6, 10, 0, 1], 1: [1, 2, 1, 5]})) == {1: [1, 3]}


def test_proportional_rule_is_algorithm_1():
    policy = based(Selective(OPERATORS, Every(1), experts=1, rule="proportional"))
    assert saved(policy.plan(2, {0: [50, 90, 0, 1], 1: [9, 0, 0, 61]})) == {0: [1], 1: [3]}


def test_every_expert_is_saved_before_maximum_age():
    policy = based(Selective(OPERATORS, Every(1), experts=2))  # of 4: at the age of 8 * 2
    load, seen = {0: [1, 0, 0, 0], 1: [1, 0, 0, 0]}, {}
    for iteration in range(2, 40):
        load = {layer: [row[0] + 900, row[1] + 900, row[2] + 900, row[3]] for layer, row in load.items()}
        for layer, experts in saved(take(policy, iteration, load)).items():
            seen.update({(layer, expert): iteration for expert in experts})
        oldest = min([seen.get((layer, 3), 1) for layer in (0, 1)])
        assert iteration - oldest <= 16 + 1
    assert (0, 3) in seen


def test_momentary_lost_tokens_are_missing_from_snapshot():
    """Equation 6, as the mean over layers: 6 of the 10 tokens of an iteration in one, none of the other's."""
    policy = based(Selective(OPERATORS, Every(1), experts=1), 10, {0: [9, 0, 0, 0], 1: [9, 0, 0, 0]})
    assert policy.report.gauges() == {"selective_experts": 4.0, "mlt": 0.0}
    take(policy, 12, {0: [9, 14, 6, 0], 1: [29, 0, 0, 0]})  # two iterations of ten tokens
    assert policy.report.gauges() == {"selective_experts": 1.0, "mlt": pytest.approx(0.6 / 2)}


def test_too_many_tokens_at_risk_warn():
    """0.3 iterations, in the mean over two layers, of a training of 20: 1.5 %."""
    policy = based(Selective(OPERATORS, Every(1), experts=1), 10, {0: [9, 0, 0, 0], 1: [9, 0, 0, 0]})
    take(policy, 12, {0: [9, 14, 6, 0], 1: [29, 0, 0, 0]})
    assert policy.mlt_limit == 0.03 and policy.report.at_risk(0.0149, 20) is None
    text, fields = policy.report.at_risk(0.0151, 20)
    assert fields == pytest.approx({"plt": 0.0301, "lost": 0.0151, "mlt": 0.3, "mlt_sum": 0.6})
    assert "3.010%" in text and "--selective-experts" in text and "--snapshot-interval" in text
    for tier, flags in (("memory", "local-gb"), ("peers", "local-gb and --selective-remote-gb")):
        other = Selective(OPERATORS, Every(1), tier=tier, mlt_limit=0.01, state=policy.state)
        assert f"raise --selective-{flags}, or lower" in other.report.at_risk(0.0, 20)[0]


def test_limit_on_lost_tokens_includes_lost_nodes():
    """Memory has all tokens, and copies on other nodes lack some."""
    peers, memory = (Selective(OPERATORS, Every(1), experts=1, tier=tier) for tier in ("peers", "memory"))
    for policy in (peers, memory):
        policy.state.mlt, policy.state.mlt_peers = 0.1, 50.0
    assert peers.report.at_risk(0.0, 1000)[1]["mlt"] == 50.0
    assert memory.report.at_risk(0.0, 1000) is None


def test_planning_changes_nothing_and_requires_token_counts():
    policy = based(Selective(OPERATORS, Every(1), experts=1))
    assert policy.plan(2, {0: [1, 0, 0, 0], 1: [0] * 4}) == policy.plan(2, {0: [1, 0, 0, 0], 1: [0] * 4})
    with raises("tokens-not-counted"):
        policy.plan(2)


def test_run_measures_then_saves_everything_and_measures_cost():
    policy = Selective(OPERATORS, IntervalTuner())
    policy.on_sizes(Told())
    assert isinstance(policy.interval, SelectiveTuner) and policy.plan(1, ZEROS) is None
    measured(policy)
    plan = policy.plan(15, ZEROS)
    assert plan.complete
    policy.on_snapshot(plan, ZEROS)
    policy.interval.observe(
        ObservedIteration(2.0, snapshot_started=True, snapshot_pending=True, forward_backward_s=1.0)
    )
    assert policy.plan(16, ZEROS) is None
    policy.interval.observe(
        ObservedIteration(2.0, snapshot_pending=True, forward_backward_s=1.0, copied=Transfer(120.0, 1.0))
    )
    plan = policy.plan(17, {0: [1, 2, 3, 4], 1: [5, 6, 7, 8]})
    assert saved(plan) == {1: [0, 1, 2, 3]}  # 120 bytes in a forward and backward: dense operators and two experts
    assert "1.2e-07 GB" in policy.report.reason()


@each_row(
    "budgets, waits",
    [
        (dict(local_gb=1.0), False),
        (dict(local_gb=1.0, tier="disk"), True),  # for how much a rank writes
        (dict(local_gb=1.0, tier="peers"), True),
        (dict(remote_gb=1.0, tier="peers"), True),
        (dict(local_gb=1.0, remote_gb=1.0, tier="peers"), False),
    ],
)
def test_given_budgets_need_no_measurement(budgets, waits):
    policy = Selective(OPERATORS, Every(1), **budgets)
    policy.on_sizes(Told())
    assert (policy.plan(1, ZEROS) is None) == waits


def test_budget_applies_to_rank_that_saves_most():
    policy = based(measured(Selective(OPERATORS, Every(1), max_age=99), copied=(120.0, 1.0)))
    policy.on_sizes(Told())
    load = {0: [9, 8, 1, 0], 1: [7, 6, 2, 0]}
    assert saved(policy.plan(20, load)) == {0: [0, 1, 2], 1: [2]}  # two experts of each rank, not the four busiest


def test_remote_budget_limits_peer_copies_separately():
    sized = dict(interval=Every(1), tier="peers", max_age=99)
    policy = based(measured(Selective(OPERATORS, **sized), copied=(1e9, 1.0), replicated=(55.0, 1.0)))
    policy.on_sizes(Told())
    load = {0: [9, 8, 1, 0], 1: [7, 6, 2, 0]}
    plan = policy.plan(20, load)
    assert saved(plan.remote_plan) == {0: [0], 1: [2]}  # 110 bytes in an iteration of 2 s
    assert saved(plan) == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]} and plan.complete and not plan.remote_plan.complete
    assert "1.1e-07 GB" in policy.report.reason()
    given_ = based(measured(Selective(OPERATORS, **sized, remote_gb=130 / GB), copied=(1e9, 1.0)))
    given_.on_sizes(Told())
    assert saved(given_.plan(20, load).remote_plan) == {0: [0, 1, 2, 3], 1: [0, 2]}
    on_disk = based(
        measured(Selective(OPERATORS, Every(1), tier="disk", max_age=99), copied=(1e9, 1.0), written=(65.0, 1.0))
    )
    on_disk.on_sizes(Told())
    plan = on_disk.plan(20, load)
    assert saved(plan) == {0: [0, 1, 2, 3], 1: [0, 2]} and plan.remote is None


def by_rank(experts: dict[int, list[int]]) -> list[int]:
    """Bytes of each of the ranks of :class:`Told`, each a node."""
    numbers = [number for row in experts.values() for number in row]
    return [100 + 10 * sum(number // 2 == rank for number in numbers) for rank in (0, 1)]


loads = st.lists(st.lists(st.integers(0, 99), min_size=8, max_size=8), min_size=1, max_size=8)


@given(loads, st.integers(110, 150), st.integers(110, 150), st.sampled_from(["per-byte", "proportional"]))
def test_memory_and_copies_each_contain_experts_they_lack(rows, local, remote, rule):
    """Within both budgets; copies are chosen as if there was nothing else, and memory has them, too."""
    budgets = dict(local_gb=local / GB, remote_gb=remote / GB, rule=rule, tier="peers")
    policy, alone = (based(measured(Selective(OPERATORS, Every(1), **budgets), copied=(1e9, 1.0))) for _ in range(2))
    for each in (policy, alone):
        each.on_sizes(Told())
    load = ZEROS
    for iteration, row in enumerate(rows, start=2):
        load = {layer: [*map(sum, zip(load[layer], row[4 * layer : 4 * layer + 4], strict=True))] for layer in load}
        as_copied = {"saved": policy.state.copied, "saved_at": policy.state.copied_at}
        alone.loading(json.loads(json.dumps(policy.state_dict() | as_copied)))()
        apart = saved(alone.plan(iteration, load).remote_plan)
        plan = take(policy, iteration, load)
        assert saved(plan.remote_plan) == apart
        assert (
            plan.remote_plan.operators.keys() <= plan.operators.keys()
            and set(DENSE) < plan.remote_plan.operators.keys()
        )
        assert plan.remote is None or plan.remote != plan.operators
        assert max(by_rank(saved(plan))) <= local and max(by_rank(saved(plan.remote_plan))) <= min(local, remote)
        if remote >= local:
            assert plan.remote is None
        for told, names in (
            (policy.state.saved_at, plan.operators),
            (policy.state.copied_at, plan.remote_plan.operators),
        ):
            newest = {
                f"layers.{layer}.expert.{e}" for layer, at in told.items() for e, i in enumerate(at) if i == iteration
            }
            assert newest == {name for name in names if ".expert." in name}


def test_copies_and_memory_lack_different_experts():
    budgets = dict(local_gb=121 / GB, remote_gb=111 / GB, tier="peers", max_age=99)
    policy = based(measured(Selective(OPERATORS, Every(1), **budgets), copied=(1e9, 1.0)))
    policy.on_sizes(Told())
    first = take(policy, 2, {0: [9, 8, 7, 6], 1: [5, 1, 5, 1]})  # two experts of each rank, and copies of one
    assert (saved(first), saved(first.remote_plan)) == ({0: [0, 1, 2, 3]}, {0: [0, 2]})
    assert policy.report.gauges() == {
        "selective_experts": 2.0,
        "selective_copies": 1.0,
        "mlt": pytest.approx(12 / 12 / 2),
        "mlt_peers": pytest.approx((14 / 30 + 12 / 12) / 2),  # a node's loss costs the 8 and the 6, too
    }
    second = take(policy, 3, {0: [9, 8, 7, 6], 1: [5, 1, 5, 1]})  # without a token more
    assert (saved(second), saved(second.remote_plan)) == ({0: [1, 3], 1: [0, 2]}, {0: [1, 3]})
    assert policy.report.chosen() == {"selective_experts": 2.0, "selective_copies": 1.0, "snapshot_interval": 1}


@each_row(
    ("moved", "apart", "first"),
    [
        (dict(copied=(110.0, 1.0)), 1, {0: [0], 1: [2]}),
        # 60 bytes too many: a stall of 1.2 s is 3 % of 40 s; twice this interval has room for more experts
        (dict(copied=(50.0, 1.0)), 40, {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}),
        (dict(copied=(1e9, 1.0), replicated=(18.0, 1.0)), 4, None),  # 110 bytes, of which an iteration brings 36
    ],
)
def test_interval_grows_if_no_expert_overlaps(moved, apart, first):
    policy = based(measured(Selective(OPERATORS, Every(2), tier="peers", max_age=99), **moved))
    policy.on_sizes(Told())
    assert policy.schedule.snapshot_interval == -(-apart // 2) * 2
    load = {0: [9, 8, 1, 0], 1: [7, 6, 2, 0]}
    due = [iteration for iteration in range(1, 41) if policy.plan(iteration, load)]
    assert due == list(range(policy.schedule.snapshot_interval, 41, policy.schedule.snapshot_interval))
    assert first is None or first == saved(policy.plan(due[0], load))


def test_too_small_budget_is_refused():
    with raises("snapshot-budget-too-small", "--selective-local-gb", "0.00000011"):
        Selective(OPERATORS, Every(1), local_gb=105 / GB).on_sizes(Told())
    with raises("snapshot-budget-too-small", "--selective-remote-gb", "0.00000011"):
        Selective(OPERATORS, Every(1), remote_gb=105 / GB, tier="peers").on_sizes(Told())
    Selective(OPERATORS, Every(1), local_gb=110 / GB).on_sizes(Told())


def test_replicas_alternate_experts_and_leave_room_for_one():
    sizes = ExpertSizes({0: 100, 1: 100}, {(0, expert): {0: 5, 1: 5} for expert in range(8)})
    assert sizes.rank_limit(120).capacity == {0: 15.0, 1: 15.0} and sizes.rank_limit(90).capacity == {0: 0.0, 1: 0.0}
    assert sizes.least_rank_bytes == 110


def test_limits_are_cached_while_measurements_are_unchanged():
    """Their tables, of all experts by rank, are not derived anew for each snapshot."""
    policy = based(measured(Selective(OPERATORS, Every(1), tier="peers"), (150.0, 1.0), (75.0, 1.0)))
    policy.on_sizes(Told())
    before = policy.limits()
    assert len(before) == 3 and all(policy.limits()[name] is limit for name, limit in before.items())
    measured(policy, copied=(260.0, 1.0), iterations=2 * BLOCK)
    now = policy.limits()
    assert [now[name] is before[name] for name in before] == [True, False, True]
    assert now["local"].capacity[0] > before["local"].capacity[0]


def test_storage_gets_experts_it_lacks():
    policy = Selective(OPERATORS, Every(1), experts=1)
    assert policy.storage.needs(full_plan(policy, 1))
    persist(policy, 1, ZEROS)
    load = {0: [9, 5, 0, 0], 1: [0] * 4}
    assert saved(take(policy, 2, load)) == {0: [0, 1]}
    load = {0: [9, 5, 3, 1], 1: [0] * 4}
    assert saved(take(policy, 3, load)) == {0: [2, 3]}
    load = {0: [9, 5, 3, 2], 1: [1, 0, 0, 0]}
    assert saved(policy.plan(4, load)) == {0: [3], 1: [0]}
    plan, part = persist(policy, 4, load)  # storage lacks nine tokens of the first
    assert saved(plan) == {0: [0, 1]} and part == plan
    assert saved(policy.plan(5, load)) == {0: [3], 1: [0]}
    assert saved(policy.storage.plan(5, load)) == {0: [2, 3]}


def test_failed_write_keeps_expert_age_in_storage():
    policy = Selective(OPERATORS, Every(1), experts=1)
    persist(policy, 1, ZEROS)
    load = {0: [9, 5, 3, 1], 1: [0] * 4}
    _, part = persist(policy, 2, load, published=False)
    assert saved(part) == {0: [0, 1]} == saved(policy.storage.plan(3, load))
    persist(policy, 3, load)
    assert saved(policy.storage.plan(4, load)) == {0: [2, 3]}


def test_experts_being_written_to_storage_are_not_repeated():
    policy = Selective(OPERATORS, Every(1), experts=1)
    persist(policy, 1, ZEROS)
    load = {0: [9, 5, 3, 1], 1: [0] * 4}
    first = policy.storage.plan(2, load)
    policy.on_snapshot(first, load)
    policy.storage.on_write_begun(first)
    assert saved(policy.storage.plan(3, load)) == {0: [2, 3]}
    policy.storage.on_write_ended(first, committed=False)
    assert saved(policy.storage.plan(3, load)) == {0: [0, 1]}


def test_resumed_run_knows_experts_in_storage():
    policy = Selective(OPERATORS, Every(1), experts=1)
    persist(policy, 1, ZEROS)
    load = {0: [9, 5, 3, 1], 1: [0] * 4}
    first = policy.storage.plan(2, load)
    policy.on_snapshot(first, load)
    policy.storage.on_write_begun(first)
    state = policy.state_dict()  # stored with the snapshot, before anybody knows whether it is published
    for published, expected in ((2, {0: [2, 3]}), (1, {0: [0, 1]})):
        again = Selective(OPERATORS, Every(1), experts=1)
        again.loading(state)()
        again.recovery.on_resume(in_memory=True, in_storage=True)
        names = [name for name in first.operators if ".expert." in name]
        everything = dict.fromkeys((one.name for one in OPERATORS), 1)
        again.storage.on_inventory(everything | dict.fromkeys(names, published))
        assert saved(again.storage.plan(3, load)) == expected


def test_partial_snapshot_is_refused_for_empty_storage():
    policy = based(Selective(OPERATORS, Every(1), experts=1))
    with raises("storage-lacks-experts"):
        policy.storage.part_of(policy.plan(2, ZEROS))
    policy.state.stored = True
    policy.storage.on_full_snapshot_lost()
    assert policy.plan(2, ZEROS).complete
    policy.recovery.on_resume(in_memory=True, in_storage=False)
    assert policy.plan(2, ZEROS).complete
    policy.recovery.on_resume(in_memory=True, in_storage=True)
    assert not policy.plan(2, ZEROS).complete


@given(st.lists(st.lists(st.integers(0, 99), min_size=8, max_size=8), min_size=1, max_size=6))
def test_policy_state_survives_json(rows):
    policy, load = based(Selective(OPERATORS, Every(1), experts=2)), ZEROS
    for iteration, row in enumerate(rows, start=2):
        load = {0: [a + b for a, b in zip(load[0], row[:4], strict=True)], 1: [*map(sum, zip(load[1], row[4:]))]}  # noqa: B905
        other = Selective(OPERATORS, Every(1), experts=2)
        other.loading(json.loads(json.dumps(policy.state_dict())))()
        assert other.plan(iteration, load) == policy.plan(iteration, load)
        take(policy, iteration, load)


def test_damaged_saved_state_is_refused():
    for state in ({}, {"based": True}, policy_named("selective")(OPERATORS, Every(1)).state_dict() | {"saved": 3}):
        with raises("saved-state-invalid"):
            Selective(OPERATORS, Every(1)).loading(state)()


@each_row(
    ("settings", "code"),
    [
        (dict(experts=0), "experts-per-snapshot-invalid"),
        (dict(experts=5), "experts-per-snapshot-invalid"),
        (dict(rule="best"), "value-not-a-choice"),
        (dict(score="age"), "value-not-a-choice"),
        (dict(survivors="all"), "value-not-a-choice"),
    ],
)
def test_invalid_settings_are_refused(settings, code):
    with raises(code, str(*settings.values())):
        Selective(OPERATORS, Every(1), **settings)


@each_row("settings", [{}, dict(experts=1), dict(local_gb=1.0)])
def test_model_without_experts_is_refused(settings):
    with raises("model-without-experts", "--ckpt-policy full"):
        Selective(operators((0, 0)), Every(1), **settings)


def asked(**flags) -> SimpleNamespace:
    defaults = {flag.name: flag.default for flag in FLAGS}
    others = dict(ckpt_tier="peers", persist_interval=None, snapshot_interval="2", mtbf_s=1.0)
    return SimpleNamespace(**(others | defaults | flags))


@each_row(
    ("flags", "sentence"),
    [
        (dict(selective_experts=2, selective_local_gb=1.0), "--selective-local-gb"),
        (dict(selective_remote_gb=1.0, ckpt_tier="memory"), "add --ckpt-tier peers"),
        (dict(selective_rule="proportional", selective_max_age=3), "--selective-max-age"),
        (dict(selective_rule="proportional", selective_score="tokens"), "--selective-score"),
        (dict(selective_boost=0.0, selective_boost_iterations=9), "--selective-boost 0"),
    ],
)
def test_contradictory_flags_are_refused(flags, sentence):
    (refused,) = POLICIES[Selective.name].flags.conflicts_in(asked(**flags))
    assert sentence in str(refused) and not list(POLICIES[Selective.name].flags.conflicts_in(asked()))


def test_settings_follow_from_flags():
    flags = asked(selective_experts=2, persist_interval=8)
    policy = Selective(OPERATORS, Every(2), **POLICIES[Selective.name].settings(flags, JobShape()))
    assert (policy.experts, policy.tier, policy.interval) == (2, "peers", Every(2))
    assert isinstance(Selective(OPERATORS, IntervalTuner(), experts=1).interval, Every)


def test_capacity_boost_is_default_if_tokens_drop():
    def boost(drops, **flags):
        return Selective(
            OPERATORS, Every(2), **POLICIES[Selective.name].settings(asked(**flags), JobShape(drops_tokens=drops))
        ).recovery.capacity_boost

    assert boost(True) == CapacityBoost(0.1, 200) and boost(False) is None
    assert boost(True, selective_boost=0.5, selective_boost_iterations=7) == CapacityBoost(0.5, 7)
    assert boost(True, selective_boost=0.0) is None


def test_overlapped_expert_counts_are_candidates():
    def machine(rate, ks=(1, 2, 4, 16)):
        of_k = lambda k: SnapshotSizes(10.0 * k, 30.0 * k)  # noqa: E731
        return Machine(3, SnapshotSizes(48.0, 144.0), of_k, ((),), 1.0, rate, ks)

    assert list(POLICIES[Selective.name].costs.candidates(machine(45.0))) == [
        {"experts": k, "gradients": "off"} for k in (1, 2, 4)
    ]
    assert [one["experts"] for one in POLICIES[Selective.name].costs.candidates(machine(5.0))] == [1] and not list(
        POLICIES[Selective.name].costs.candidates(machine(5.0, ()))
    )
    price = POLICIES[Selective.name].costs.price(machine(45.0), {})
    assert (price.k, price.size.busiest) == (4, 40.0) and POLICIES[Selective.name].costs.price(
        machine(45.0), {"experts": 2}
    ).k == 2
    assert POLICIES[Selective.name].costs.price(machine(45.0, ()), {}).k is None and price.tokens_at_risk is None
    counted = dataclasses.replace(machine(45.0), tokens_at_risk=lambda share, always: 8 * share * always)
    assert POLICIES[Selective.name].costs.price(counted, {}).tokens_at_risk == 2.0  # 4 of 16
    assert (POLICIES[Selective.name].costs.describe({"experts": 4}), POLICIES[Selective.name].costs.describe({})) == (
        "4 experts",
        "",
    )
    assert POLICIES[Selective.name].costs.describe({"experts": 4, "gradients": "off"}) != "4 experts"


def test_copies_run_in_bubbles_if_available():
    flags = asked(selective_hide="bubble", selective_gradients="off")
    jobs = JobShape(pp=2, bubble_share=0.5), JobShape(pp=2)
    timed, cuda = (
        Selective(OPERATORS, IntervalTuner(), **POLICIES[Selective.name].settings(flags, job)) for job in jobs
    )
    assert Capability.BUBBLES in timed.requires and not [*timed.report.remarks()]
    assert Capability.BUBBLES not in cuda.requires and "no effect" in next(cuda.report.remarks())
    seen = dict(copied=Transfer(120.0, 1.0))
    for policy in (timed, cuda, Selective(OPERATORS, Every(1), bubble_share=0.5)):
        for _ in range(WARM_UP + BLOCK):
            policy.interval.observe(ObservedIteration(2.0, forward_backward_s=1.0, **seen))
        assert policy.interval.local_bytes == (60.0 if policy is timed else 120.0)
        assert ("bubbles" in policy.report.reason()) == (policy is timed)
    fixed = Selective(OPERATORS, Every(1), experts=1, hide="bubble", bubble_share=0.5)
    assert Capability.BUBBLES in fixed.requires and isinstance(fixed.interval, Every)
    with raises("value-not-a-choice", "night"):
        Selective(OPERATORS, Every(1), hide="night")
