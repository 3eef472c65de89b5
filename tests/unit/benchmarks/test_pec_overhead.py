"""The arithmetic between what a run tells and Figure 12, and that each method is what its name says."""

import re

import pytest

from benchmarks import pec_overhead
from benchmarks.overhead import figures, methods, report
from benchmarks.overhead.watch import Watch
from benchmarks.save_peers.rounds import WARM_UP, Plan
from moc.store.host_memory import memory_storage
from moc.store.manifest import FileEntry, Manifest
from moc.store.runs import begin_run
from moc.store.storage import LocalStorage
from moc.store.store import Store
from tests.cases import each_row

EVERY = 6
SLOW = 1.5  # seconds more of the iteration beside which a snapshot is copied


def events(*, saves=2, stored_after=25.0, stall=0.25) -> list[dict]:
    """Iterations of 10 s; a snapshot begins at the end of every sixth, and the one after it is slower."""
    told, now = [], 0.0
    for iteration in range(1, EVERY * (saves + 2)):
        elapsed = 10.0 + SLOW * (iteration % EVERY == 1 and iteration > EVERY)
        now += elapsed
        told.append(dict(type="iteration", iteration=iteration, time=now, elapsed_s=elapsed))
        if iteration % EVERY == 0:
            told.append(dict(type="stall", iteration=iteration, time=now, seconds=stall))
            told.append(dict(type="snapshot", iteration=iteration, time=now + 8, bytes=60, copy_s=1.0, hash_s=0.5))
            stored = dict(type="persist", iteration=iteration, bytes=30, write_s=3.0, publish_s=0.5)
            told.append(stored | dict(time=now + stored_after))
    return told


SIZES = {
    "memory": {i * EVERY: [10, 20, 30] for i in (1, 2, 3)},
    "storage": {i * EVERY: [5, 15, 10] for i in (1, 2, 3)},
}


def plan(tmp_path, saves=2) -> Plan:
    return Plan(tmp_path, saves=saves, every=EVERY, plain=0)


def test_what_iterations_take_is_compared_with_those_before_the_first_snapshot(tmp_path):
    told = figures.measured(events(), SIZES, plan(tmp_path))
    assert told["plain_s"] == [10.0] * (EVERY - 1 - WARM_UP)
    assert len(told["rounds"]) == 2
    for save in told["rounds"]:
        assert save["stall_s"] == 0.25
        assert save["extra_s"] == pytest.approx(SLOW) and save["overhead_s"] == pytest.approx(SLOW)
        assert (save["capture_s"], save["hash_s"], save["persist_s"], save["publish_s"]) == (1.0, 0.5, 3.0, 0.5)
        assert save["complete_s"] == 25.0 and save["iterations"] == 2
        assert save["ranks"] == {"memory": [10, 20, 30], "storage": [5, 15, 10]}


def test_iterations_with_snapshots_are_not_plain_ones(tmp_path):
    slow_from = EVERY * 2  # nothing before the first snapshot is slower, so all that is slower is the snapshots'
    told = figures.measured(
        [e | dict(elapsed_s=99.0) if e.get("elapsed_s") and e["iteration"] >= slow_from else e for e in events()],
        SIZES,
        plan(tmp_path),
    )
    assert max(told["plain_s"]) == 10.0
    assert told["rounds"][0]["extra_s"] == pytest.approx(2 * 99.0 - 2 * 10.0)


def test_without_a_memory_tier_the_buffer_is_as_large_as_the_file(tmp_path):
    told = figures.measured(events(), {"storage": SIZES["storage"]}, plan(tmp_path))
    assert told["rounds"][0]["ranks"]["memory"] == [5, 15, 10]


def test_a_snapshot_that_storage_did_not_get_in_time_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r" 6 .* 12(.|\n)*--every"):
        figures.measured(events(stored_after=70.0), SIZES, plan(tmp_path))
    without = [e for e in events() if not (e["type"] == "persist" and e["iteration"] == 12)]
    with pytest.raises(ValueError, match=r"persist .* 12(.|\n)*--every"):
        figures.measured(without, SIZES, plan(tmp_path))


def test_a_manifest_that_nobody_saw_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="manifest .* 6"):
        figures.measured(events(), {"storage": {}}, plan(tmp_path))


def a_save(**values) -> dict:
    seconds = dict(stall_s=0.1, extra_s=1.0, overhead_s=2.0, capture_s=0.3, hash_s=0.2, persist_s=4.0, publish_s=0.5)
    ranks = {"memory": [10, 20, 30], "storage": [5, 15, 10]}
    return seconds | dict(complete_s=25.0, iterations=2, ranks=ranks) | values


def a_run(*saves, plain=10.0) -> dict:
    return {"plain_s": [plain] * 3, "first": a_save(stall_s=99.0), "rounds": list(saves) or [a_save()]}


def test_a_summary_takes_medians_over_turns_and_leaves_the_first_snapshot_out():
    runs = [a_run(a_save(stall_s=0.1), a_save(stall_s=0.9)), a_run(a_save(stall_s=0.2))]
    told = figures.summary(runs, iteration_s=10.0, blocking=False)
    assert told["o_save_s"] == 0.2
    assert told["t_snapshot_s"] == 0.5 and told["t_persist_s"] == 4.5 and told["work"] == 0.5
    assert told["bytes"] == {"memory": 60, "storage": 30} and told["bottleneck"] == {"memory": 30, "storage": 15}


@each_row("stored_s, interval", [(9.0, 1), (10.0, 1), (10.1, 2), (20.0, 2), (25.0, 3), (0.0, 1)])
def test_the_interval_is_how_many_iterations_pass_until_storage_has_it(stored_s, interval):
    told = figures.summary([a_run(a_save(complete_s=stored_s))], iteration_s=10.0, blocking=False)
    assert told["interval"] == interval and told["interval_exact"] == stored_s / 10


def test_storage_follows_any_interval_where_training_waits_for_it():
    told = figures.summary([a_run(a_save(complete_s=25.0, stall_s=25.0))], iteration_s=10.0, blocking=True)
    assert told["interval"] == 1 and told["o_save_most_s"] == told["o_save_s"] == 25.0


def test_workers_that_wait_one_after_the_other_wait_for_the_sum():
    told = figures.summary([a_run()], iteration_s=10.0, blocking=False)
    assert told["o_save_most_s"] == pytest.approx(4 * 0.1)


def test_a_normal_iteration_is_the_median_of_all_methods():
    samples = {"baseline": [a_run(plain=10.0), a_run(plain=30.0)], "moc-async": [a_run(plain=20.0)]}
    assert figures.pooled_iteration_s(samples) == 20.0


def a_summary(**values) -> dict:
    return figures.summary([a_run(a_save(**values))], iteration_s=10.0, blocking=False)


def test_moc_is_compared_with_what_was_measured():
    moc, base = a_summary(stall_s=0.02, complete_s=20.0), a_summary(complete_s=70.0)
    baseline = figures.summary([a_run(a_save(stall_s=4.0))], iteration_s=10.0, blocking=True)
    told = figures.against(moc, baseline, base)
    assert told["o_save_reduction"] == pytest.approx(1 - 0.02 / 4.0)
    assert told["o_save_most_reduction"] == pytest.approx(1 - 0.08 / 4.0)
    assert told["interval_ratio"] == 2 / 7 and told["interval_exact_ratio"] == pytest.approx(2 / 7)
    assert told["work_ratio"] == 1.0  # both were written for as long
    assert figures.against(moc, None, None) == {}


def test_what_a_method_takes_of_what_the_baseline_takes():
    baseline = a_summary(ranks={"memory": [40, 40, 40], "storage": [40, 40, 40]}, capture_s=0.8, persist_s=8.5)
    told = figures.of_baseline(a_summary(), baseline)
    assert told == {
        "t_snapshot": pytest.approx(0.5),
        "t_persist": pytest.approx(0.5),
        "bytes_memory": 60 / 120,
        "bytes_storage": 30 / 120,
        "bottleneck_memory": 30 / 40,
        "bottleneck_storage": 15 / 40,
    }


def test_storage_follows_if_it_gets_all_snapshots_but_the_first():
    told = figures.followed(events(saves=3), every=EVERY, snapshots=3)
    assert (told["due"], told["stored"], told["stall_s"]) == (3, 3, 0.25)
    skipped = [e for e in events(saves=3) if not (e["type"] == "persist" and e["iteration"] == 3 * EVERY)]
    assert figures.followed(skipped, every=EVERY, snapshots=3)["stored"] == 2


def test_storage_is_tried_at_interval_and_next_shorter_one():
    assert pec_overhead.shortest(3) == [3, 2] and pec_overhead.shortest(1) == [1]


TIMERS = """ [2026-11-21 15:55:43] iteration {i} | elapsed time per iteration (ms): 2494.9 |
(min, max) time across ranks (ms):
    forward-backward ...............................: (712.91, {fb})
    all-grads-sync .................................: (537.54, {sync})
    optimizer-inner-step ...........................: (170.31, 306.01)
"""


def test_forward_and_backward_are_a_part_of_each_iteration_after_the_first_ones():
    timed = [("9000.0", "1.0"), ("9000.0", "1.0"), ("800.00", "200.0"), ("1500.00", "500.0")]
    output = "".join(TIMERS.format(i=i, fb=fb, sync=sync) for i, (fb, sync) in enumerate(timed))
    assert figures.forward_backward_share(output, [10.0, 10.0, 2.0, 2.5]) == pytest.approx((0.5 + 0.8) / 2)
    with pytest.raises(ValueError, match="timing-log-level"):
        figures.forward_backward_share(output, [10.0] * 5)


def test_the_watch_remembers_what_is_gone(tmp_path):
    storage, memory = tmp_path / "checkpoints", tmp_path / "memory"
    memory.mkdir()
    stores = {
        "storage": Store(LocalStorage(storage)),
        "memory": Store(memory_storage(memory, str(storage), begin_run(LocalStorage(storage), str(storage)).run)),
    }
    watch = Watch(storage, memory)
    for number, store in enumerate(stores.values()):
        files = {f"rank_{rank:05d}.safetensors": FileEntry(100 * number + rank + 8, 8, "0" * 32) for rank in (1, 0)}
        store.publish(Manifest(7, "full", 2, files, {}))
        watch.look()
        store.remove(7)
    assert watch.sizes == {"storage": {7: [8, 9]}, "memory": {7: [108, 109]}}


def test_the_watch_sees_what_comes_at_the_end(tmp_path):
    (tmp_path / "memory").mkdir()
    with Watch(tmp_path / "checkpoints", tmp_path / "memory") as watch:
        files = {"rank_00000.safetensors": FileEntry(9, 8, "0" * 32)}
        Store(LocalStorage(tmp_path / "checkpoints")).publish(Manifest(1, "full", 1, files, {}))
    assert watch.sizes["storage"] == {1: [9]}


def test_a_manifest_that_cannot_be_read_is_passed_over(tmp_path):
    (tmp_path / "memory").mkdir()
    directory = tmp_path / "checkpoints" / "iter_0000001"
    directory.mkdir(parents=True)
    (directory / "manifest.json").write_text("{")
    watch = Watch(tmp_path / "checkpoints", tmp_path / "memory")
    watch.look()
    assert watch.sizes["storage"] == {}


def snapshot_config(name: str):
    from megatron.pretraining.entry.offline import config_of_words

    flags = [*methods.model_flags(True), "--train-iters", "9", "--ckpt-dir", "d", "--snapshot-interval", "6"]
    return config_of_words([*flags, *methods.METHODS[name].flags(6).split()], None).snapshot


def test_each_method_is_what_its_name_says():
    baseline, base_async = snapshot_config(methods.BASELINE), snapshot_config(methods.BASE_ASYNC)
    for snapshot, blocking in ((baseline, True), (base_async, False)):
        assert (snapshot.ckpt_policy, snapshot.ckpt_sharding, snapshot.ckpt_tier) == ("full", "baseline", "disk")
        assert snapshot.ckpt_blocking is blocking
    for name, counts in (("moc-async", (4, 1)), ("moc-async-k1", (1, 1))):
        moc = snapshot_config(name)
        assert (moc.ckpt_policy, moc.ckpt_sharding, moc.ckpt_tier) == ("pec", "EE+AN", "memory")
        assert (moc.pec_k_snapshot, moc.pec_k_persist) == methods.METHODS[name].k == counts
        assert moc.persist_interval == 6 and not moc.ckpt_blocking


def test_sets_are_those_of_the_figures():
    swept, rules = methods.SETS["swept"], methods.SETS["rules"]
    assert [methods.METHODS[name].k for name in swept] == [None, None, *((k, k) for k in (1, 2, 4, 8, 16))]
    sharding = [snapshot_config(name).ckpt_sharding for name in rules]
    assert sharding == ["baseline"] * 2 + ["EE", "EE+EN", "EE+AN"] * 2
    assert [methods.METHODS[name].k for name in rules] == [None] * 5 + [(1, 1)] * 3
    assert pec_overhead.parse(["--methods", "swept", "baseline"]).methods == list(swept)


def test_without_zero_is_without_zero():
    zero = "--use-distributed-optimizer"
    assert zero in methods.model_flags(True, "DP4xEP2")
    assert zero not in methods.model_flags(True, "DP4xEP2-replicated")


@each_row("quick, millions", [(False, 143), (True, 2.2)])
def test_the_model_is_made_of_experts(quick, millions):
    counts = methods.parameters(methods.model_flags(quick))
    total = counts["experts"] + counts["others"]
    assert counts["num_experts"] == 16 and total / 1e6 == pytest.approx(millions, rel=0.02)
    assert counts["experts"] / total == pytest.approx(0.94, abs=0.005)


def test_a_model_in_between_is_made_of_experts_too():
    counts = methods.parameters(methods.model_flags(False, hidden_size=256))
    total = counts["experts"] + counts["others"]
    assert total / 1e6 == pytest.approx(37, rel=0.02) and counts["experts"] / total == pytest.approx(0.91, abs=0.01)


def test_too_few_iterations_between_snapshots_are_refused(capsys):
    with pytest.raises(SystemExit):
        pec_overhead.parse(["--every", "4"])
    assert "--every 4" in capsys.readouterr().err
    assert pec_overhead.parse(["--every", "5"]).every == 5


def told_of_all() -> dict:
    summaries = {
        name: figures.summary([a_run(a_save(stall_s=4.0 if m.blocking else 0.02))], 10.0, m.blocking)
        for name, m in methods.METHODS.items()
    }
    baseline, base = summaries[methods.BASELINE], a_summary(complete_s=35.0)
    moc = {n: figures.against(s, baseline, base) for n, s in summaries.items() if methods.METHODS[n].two_levels}
    return {
        "iteration_s": 10.0,
        "forward_backward_s": 7.0,
        "methods": summaries,
        "ratios": moc,
        "of_baseline": {"moc-async": figures.of_baseline(summaries["moc-async"], baseline)},
        "followed": {"moc-async": [figures.followed(events(saves=3), every=EVERY, snapshots=3)]},
        "sizes": {"moc-async": {"measured": {"memory": 60, "storage": 30}, "equation": {"memory": 50, "storage": 30}}},
        "failed": {"base-async": "it broke"},
    }


def test_the_table_the_lines_and_the_plot_hold_every_method(tmp_path):
    from rich.console import Console

    told = told_of_all()
    report.plot({"DP4xEP4": told, "DP4xEP2": told}, tmp_path / "plot.png")
    report.plot_durations({"DP4xEP4": told, "DP4xEP2": told}, tmp_path / "durations.png")
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("plot.png", "durations.png"))
    console = Console(width=200, record=True, file=open("/dev/null", "w"))
    console.print(report.table("DP4xEP4", told))
    text = console.export_text()
    assert all(method.label in text for method in methods.METHODS.values())
    said = "\n".join(report.lines(told))
    assert re.search(r"99.50% O_save .*98%: met", said) and re.search(r"75.00% I_ckpt .*50%: missed", said)
    assert re.search(r"100.0% .*T_snapshot .*100.0% .*T_persist.*100.0%", said)
    assert "3 of 3" in said and "memory 1.2000" in said and "it broke" in said


def test_only_what_runs_beside_training_overlaps_it():
    parts, names = report.segments(told_of_all()), list(methods.METHODS)
    assert parts["beside"] == [0.0, *[0.5] * (len(names) - 1)]
    assert [a + b for a, b in zip(parts["beside"], parts["forward_backward"], strict=True)] == [7.0] * len(names)
    assert parts["update"] == [3.0] * len(names)
    assert parts["o_save"][0] == 4.0 and parts["slower"][0] == 0.0
    assert parts["slower"][1] == pytest.approx(1.0 - 0.02)
