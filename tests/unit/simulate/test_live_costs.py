"""What is chosen for a run that trains, in the program's own ways, is as good as what simulating everything finds."""

import dataclasses
import random
from statistics import fmean

import pytest

from moc.policy import POLICIES
from moc.policy.pec_selection import candidate_expert_counts
from moc.policy.windows import OperatorBytes
from moc.sharding import ParallelLayout
from moc.simulate.engine import SimulatedJob, simulate
from moc.simulate.failures import Faults
from moc.simulate.live_costs import (
    NAMES,
    Running,
    SavedBytes,
    every_candidate,
    flags_of_candidate,
    host_bytes,
    options_of,
    priced,
    saved_by_rules,
    shortest_interval,
)
from moc.simulate.planner import PlanLimits, best_of, keeps_to
from moc.simulate.policy_costs import Strategy
from moc.simulate.sizes import full_sizes
from moc.store.host_memory import spare_buffers
from tests.cases import each_row
from tests.errors import raises
from tests.unit.simulate.setups import OPERATORS

EXPERTS, EXPERT, REST = 8, 10.0, 20.0
SAVED = SavedBytes(
    REST + EXPERTS * EXPERT,
    {k: REST + k * EXPERT for k in range(1, EXPERTS + 1)},
    [[OperatorBytes(EXPERT, EXPERT / 6)] * EXPERTS + [OperatorBytes(REST / 4, REST / 24)] * 4],
)
LIMITS = PlanLimits(policies=NAMES, plt=0.0375, replicas=(1, 2))


def running(tier="disk", copy_s=2.0, write_s=8.0, iteration_s=1.0, nodes=4, **changes) -> Running:
    """One whose snapshot of everything takes so many seconds to copy, and then to write."""
    run = Running(
        tier=tier,
        nodes=nodes,
        ranks=2,
        saved=SAVED,
        iteration_s=iteration_s,
        forward_backward_s=0.9 * iteration_s,
        copy_rate=SAVED.full / copy_s,
        write_rate=SAVED.full / write_s,
        replicate_rate=2 * SAVED.full,
    )
    return dataclasses.replace(run, **changes)


def chosen(run, mtbf_s=3600.0, **limits):
    limits = dataclasses.replace(LIMITS, **limits)
    return best_of(every_candidate(run, mtbf_s, limits), run.iteration_s, mtbf_s, limits)


def measured(run, mtbf_s, found, seeds=2):
    jobs = (SimulatedJob(run.iteration_s, nodes=4, stages=1, seed=seed, wall_s=100 * mtbf_s) for seed in range(seeds))
    return fmean(simulate(job, Faults(mtbf_s), Strategy(found.saving)).ettr for job in jobs)


def all_settings(run, mtbf_s, limits):
    """Of all that can be chosen, also with shorter and longer intervals; a window has no other."""
    for found in every_candidate(run, mtbf_s, limits):
        if found.saving.name == "sparse":
            yield found
            continue
        least, best = shortest_interval(run, found.saving.name, found.options), found.saving.interval
        for interval in sorted({max(least, round(best * by)) for by in (0.25, 0.5, 1, 2, 4)}):
            yield priced(run, found.saving.name, dataclasses.replace(found.options, interval=interval))


@each_row("number", range(30))
def test_choice_is_within_one_point_of_best(number):
    rng = random.Random(number)
    tier, iteration_s = rng.choice(["disk", "memory", "peers"]), rng.uniform(0.5, 8)
    copy_s, write_s = (iteration_s * 10 ** rng.uniform(-0.5, high) for high in (1, 1.7))
    run = running(tier, copy_s, write_s, iteration_s)
    mtbf_s = rng.choice([20, 100, 500, 5000]) * iteration_s
    limits = dataclasses.replace(LIMITS, exact_only=rng.random() < 0.5)
    best = measured(run, mtbf_s, best_of(every_candidate(run, mtbf_s, limits), iteration_s, mtbf_s, limits).best)
    others = {
        (one.name, one.saving.interval): measured(run, mtbf_s, one)
        for one in all_settings(run, mtbf_s, limits)
        if keeps_to(one, limits)
    }
    assert best >= max(others.values()) - 0.01, (others, best)


def test_slow_disk_lengthens_intervals():
    slow, fast = (chosen(running(write_s=write_s), policies=("full",)).best for write_s in (160.0, 1.0))
    assert slow.saving.interval == 162 > fast.saving.interval  # one is copied and written before the next begins


def test_hidden_snapshots_are_saved_as_often_as_possible():
    found = chosen(running("memory", copy_s=0.5, write_s=40.0), exact_only=True, policies=("full",)).best
    assert found.saving.interval == 1 and found.saving.stall_s == 0
    assert found.options.persist_interval == 50  # as often as storage can follow, with a quarter to spare


def test_experts_are_stored_with_each_snapshot():
    found = chosen(running("memory", write_s=20.0), policies=("pec",)).best
    assert found.options.persist_interval == found.saving.interval
    assert found.saving.interval >= SAVED.by_k[found.options.k] / SAVED.full * 20.0


def test_lost_token_limit_shortens_intervals():
    found = [chosen(running(copy_s=20.0, write_s=2.0), policies=("pec",), plt=plt).best for plt in (1.0, 0.001)]
    assert found[0].saving.interval > found[1].saving.interval and found[0].plt > 0.001 >= found[1].plt


def test_only_exact_policies_are_proposed_without_experts():
    dense = dataclasses.replace(SAVED, by_k={}, stages=[[OperatorBytes(REST / 4, REST / 24)] * 4])
    found = every_candidate(running("memory", saved=dense), 3600.0, LIMITS)
    exact = {name for name in NAMES if POLICIES[name].is_exact}
    assert {one.saving.name for one in found} == {"full", "sparse"} == exact - {"gradient"}


def test_policy_may_have_own_lost_token_limit():
    run, limit = running(copy_s=20.0, write_s=2.0), {"selective": 0.01}
    free, own = (chosen(run, policies=("selective",), plt=1.0, plt_by_policy=of).best for of in ({}, limit))
    assert free.plt > 0.01 >= own.plt and free.saving.interval > own.saving.interval
    assert chosen(run, policies=("pec",), plt=1.0, plt_by_policy=limit).best.plt > 0.01


@each_row("tier", ["memory", "disk"])
def test_experts_with_most_to_lose_are_saved(tier):
    """At the same cost, and with fewer tokens lost than in turn; without counts, both are expected to lose as many."""
    few, equal = ({layer: row for layer in range(3)} for row in ([900, 90, 9, 1, 1, 1, 1, 1], [7] * EXPERTS))
    run, both = running(tier, write_s=4.0), dict(mtbf_s=300.0, policies=("pec", "selective"))
    plan = chosen(dataclasses.replace(run, loads=few), **both)
    assert plan.best.saving.name == "selective" and plan.best.plt < 0.2 * plan.alternatives[0].plt
    assert plan.best.ettr == pytest.approx(plan.alternatives[0].ettr)
    for loads in (None, equal, {layer: [0] * EXPERTS for layer in range(3)}):
        found = [
            chosen(dataclasses.replace(run, loads=loads), 300.0, policies=(name,)).best for name in both["policies"]
        ]
        assert found[0].plt == pytest.approx(found[1].plt) and found[0].ettr == pytest.approx(found[1].ettr)
    exact = chosen(dataclasses.replace(run, loads=few), 300.0, exact_only=True)
    assert {one.saving.exact for one in (exact.best, *exact.alternatives)} == {True}


FEW = {layer: [900, 90, 30, 9, 5, 5, 5, 5] for layer in range(3)}


def of_experts(run, mtbf_s=3600.0, **limits):
    """The candidates of ``selective`` with copies on one other node, by experts and whether gradients are saved."""
    limits = dataclasses.replace(LIMITS, policies=("selective",), replicas=(1,), **limits)
    found = every_candidate(run, mtbf_s, limits)
    return {(run.price("selective", one.options).k, "bytes" in one.options.own): one for one in found}


def test_gradients_lose_fewer_tokens_and_hide_as_states():
    saved = dataclasses.replace(SAVED, gradient=1 / 3)
    run = running("peers", copy_s=1.5, write_s=30.0, loads=FEW, saved=saved, replicate_rate=200 * SAVED.full)
    found = of_experts(run)
    states, gradients = found[2, False], found[2, True]
    assert gradients.plt / gradients.saving.interval < 0.5 * states.plt / states.saving.interval
    assert gradients.saving.stall_s == states.saving.stall_s and gradients.ettr >= states.ettr
    cost = 1 / 3 + (2 / 3) / 17  # a state in every 17th snapshot: 4 times the 4 that save all experts in turn
    chained = 2 / cost / 3 * EXPERT  # gradients of the experts that are always saved, of a rank
    assert gradients.host_bytes - states.host_bytes == pytest.approx(2 * run.ranks * 16 * chained)  # one's own, a copy
    folded = 2 / cost / EXPERTS * 16 / 2
    assert gradients.saving.restart_s - states.saving.restart_s == pytest.approx(folded * 0.1)


def test_gradients_need_snapshots_each_iteration_on_peers():
    saved = dataclasses.replace(SAVED, gradient=1 / 3)
    run = running("peers", write_s=30.0, loads=FEW, saved=saved, replicate_rate=200 * SAVED.full)
    for (_, has), one in of_experts(run).items():
        flags = flags_of_candidate(one)
        assert flags.get("selective_gradients") == (None if has else "off")
        assert not has or flags["snapshot_interval"] == "1" and flags["persist_interval"] >= 10
        assert has or flags["persist_interval"] == int(flags["snapshot_interval"])
    assert {has for _, has in of_experts(run)} == {True, False}
    slow = dataclasses.replace(run, replicate_rate=0.1 * SAVED.full)  # so that they cannot follow each other
    memory, disk = (dataclasses.replace(run, tier=tier) for tier in ("memory", "disk"))
    for other in (slow, memory, disk, dataclasses.replace(run, saved=SAVED)):
        assert {has for _, has in of_experts(other)} == {False}


def test_gradients_are_selected_with_and_without_token_limit():
    saved = dataclasses.replace(SAVED, gradient=1 / 3)
    run = running("peers", copy_s=1.5, write_s=30.0, loads=FEW, saved=saved, replicate_rate=200 * SAVED.full)
    free, limited = (
        chosen(run, 60.0, policies=("selective",), replicas=(1,), plt=plt).best.options.own for plt in (1.0, 0.002)
    )
    assert "gradients" not in free and "gradients" not in limited


def test_sparse_window_is_replayed_by_all():
    run = running(copy_s=1.2, write_s=1.2)
    found = chosen(run, policies=("sparse",)).best
    assert found.saving.exact and not found.saving.local and found.saving.stall_s == 0
    assert found.saving.replay_s == run.iteration_s and found.saving.lag > found.saving.interval > 1


def test_peer_copies_cost_memory_and_time():
    run = running("peers")
    one, two = (priced(run, "full", options_of({"replicas": n, "snapshot_interval": "5"}, 60.0)) for n in (1, 2))
    assert two.host_bytes - one.host_bytes == 4 * run.ranks * SAVED.full
    assert two.saving.lag > one.saving.lag and (two.survives, one.survives) == (2, 1)
    limit = host_bytes("peers", run.ranks, SAVED.full, 1)
    assert chosen(run, host_bytes=limit).best.options.replicas == 1
    assert chosen(running("memory")).best.options.replicas == 0


def test_memory_retains_experts_missing_in_newest_snapshot():
    """Of the node, and of the one that it keeps copies for; a disk keeps whole snapshots.

    With each buffer but one that is not known to be safe, as many experts are carried as a snapshot has, or lacks.
    """
    flags = {"replicas": 1, "snapshot_interval": "5"}
    for tier, copies in (("memory", 1), ("peers", 2), ("disk", 0)):
        run = running(tier)
        of = flags if tier == "peers" else flags | {"replicas": 0}
        full, pec, selective, everything = (
            priced(run, policy, options_of(of | own, 60.0)).host_bytes
            for policy, own in (
                ("full", {}),
                ("pec", {"pec_k": 2}),
                ("selective", {"selective_experts": 3, "selective_gradients": "off"}),
                ("pec", {"pec_k": EXPERTS}),
            )
        )
        others = spare_buffers(tier) - 1
        assert pec - full == pytest.approx(copies * run.ranks * (EXPERTS + others * 2) * EXPERT)
        assert selective - full == pytest.approx(copies * run.ranks * (EXPERTS + others * 3) * EXPERT)
        assert everything == full


def test_memory_tier_needs_buffers_of_several_windows():
    options = options_of({"sparse_window": "4"}, 60.0)
    on_disk, in_memory = (priced(running(tier), "sparse", options) for tier in ("disk", "memory"))
    assert on_disk.host_bytes == priced(running(), "full", options_of({}, 60.0)).host_bytes
    largest = max(running("memory").price("sparse", options).snapshots)
    assert in_memory.host_bytes == pytest.approx(running().ranks * (SAVED.full + 11 * largest))  # 3 windows, less one


CHOICES = [(policy, tier) for policy in NAMES if policy != "gradient" for tier in ("disk", "memory", "peers")]


@each_row("policy, tier", [*CHOICES, ("gradient", "peers")])
def test_flags_describe_complete_choice(policy, tier):
    run = running(tier, saved=dataclasses.replace(SAVED, gradient=1 / 3 if policy == "gradient" else None))
    found = chosen(run, policies=(policy,)).best
    flags = flags_of_candidate(found)
    assert flags["ckpt_policy"] == policy and ("persist_interval" in flags) == (tier != "disk")
    again = priced(run, policy, options_of(flags, 3600.0))
    assert (again.saving, again.ettr) == (found.saving, found.ettr)


def test_gradient_policy_is_offered_only_with_peer_copies():
    saved = dataclasses.replace(SAVED, gradient=1 / 3)
    limits = dataclasses.replace(LIMITS, policies=("gradient",), replicas=(1,))
    assert list(every_candidate(running("memory", saved=saved), 3600.0, limits)) == []
    run = running("peers", saved=saved)
    found = {one.options.settings["window"]: one for one in every_candidate(run, 3600.0, limits)}
    assert set(found) >= {2} and all(one.saving.exact and one.saving.interval == 1 for one in found.values())
    price = POLICIES["gradient"].costs.price(run.machine_with(found[2].options), {"window": 3})
    everything = SAVED.full
    assert price.size.busiest == pytest.approx(everything * (1 / 3 + 2 / 9))
    assert price.repeated_updates == 1


@each_row("experts", [1, 2, 16, 17, 24, 64, 100])
@each_row("tier", ["disk", "memory", "peers"])
def test_any_number_of_experts_can_be_priced(tier, experts):
    rng, layers = random.Random(experts), range(2)
    by_k = {k: REST + k * EXPERT for k in candidate_expert_counts(experts)}
    stage = [OperatorBytes(EXPERT, EXPERT / 6)] * experts + [OperatorBytes(REST / 4, REST / 24)] * 4
    saved = SavedBytes(by_k[experts], by_k, [stage], 1 / 3)
    for loads in (None, {layer: [rng.randrange(1000) for _ in range(experts)] for layer in layers}):
        for write_s, replicate in ((1.0, 200.0), (80.0, 2.0)):
            run = running(tier, 0.5, write_s, saved=saved, loads=loads, replicate_rate=replicate * saved.full)
            found = list(every_candidate(run, 3600.0, LIMITS))
            assert {"full", "sparse"} <= {one.saving.name for one in found}
            for one in found:
                again = priced(run, one.saving.name, options_of(flags_of_candidate(one), 3600.0))
                assert again.ettr == pytest.approx(one.ettr)
            for name in NAMES:
                assert priced(run, name, options_of({}, 3600.0)).ettr > 0


def test_bytes_are_interpolated_by_number_of_experts():
    saved = dataclasses.replace(SAVED, by_k={1: 30.0, 2: 40.0, 4: 60.0, 6: 100.0})
    assert [saved.with_experts(k) for k in range(1, 7)] == [30.0, 40.0, 50.0, 60.0, 80.0, 100.0]


def test_sizes_follow_sharding_rules():
    layout = ParallelLayout(world=16, pp=4, ep=4)
    saved = saved_by_rules(OPERATORS, layout)
    assert saved.full == full_sizes(OPERATORS, layout).busiest == saved.by_k[16] > saved.by_k[1]
    assert sum(map(len, saved.stages)) == len(OPERATORS)
    busiest = max(sum(one.full for one in stage) for stage in saved.stages)
    assert busiest == pytest.approx(saved.full)
    assert all(one.compute == pytest.approx(one.full / 6, rel=0.05) for stage in saved.stages for one in stage)


@each_row(
    ("changes", "code", "named"),
    [(dict(tier="tape"), "value-not-a-choice", "tape"), (dict(copy_rate=0.0), "value-out-of-range", "copy_rate")],
)
def test_invalid_run_is_refused(changes, code, named):
    with raises(code, named):
        running(**changes)
