"""The arithmetic between what was measured and what is told."""

import json
import sys

import pytest

from benchmarks import save_stall
from benchmarks.save_peers import cases, ours, report, rounds
from benchmarks.save_peers.rounds import Plan
from moc.files.event_log import read_events


def test_early_worker_waits_for_peers_not_for_save():
    early, late = [(0.0, 5.0), (6.0, 6.5)], [(3.0, 4.0), (6.0, 7.0)]
    assert rounds.stall([early, late]) == (5.0 - 3.0) + (7.0 - 6.0)


def test_different_standstill_counts_are_refused():
    with pytest.raises(ValueError):
        rounds.stall([[(0.0, 1.0)], [(0.0, 1.0), (2.0, 3.0)]])


def a_save(**values) -> dict:
    return dict(stall_s=1.0, round_s=10.0, complete_s=2.0, unsynced_s=0.5, bytes=100) | values


def test_copies_per_byte_are_reported_if_counted():
    saves = {"rounds": [a_save(bytes=100)], "first": a_save()}
    assert report.summary(saves | {"copied_bytes": 150}, every=3, plain_s=[3.0])["copies"] == 1.5
    assert report.summary(saves, every=3, plain_s=[3.0])["copies"] is None


def test_summary_takes_medians_and_separates_first_save():
    saves = [a_save(stall_s=s) for s in (1.0, 9.0, 2.0)]
    told = report.summary({"rounds": saves, "first": a_save(stall_s=50.0)}, every=3, plain_s=[2.0, 3.0, 99.0])
    assert told["stall_s"] == 2.0 and told["first_stall_s"] == 50.0
    assert told["overhead_s"] == 10.0 - 3 * 3.0
    assert told["durable_s"] == 2.5


MACHINE, OURS = ("memcpy", "write", "read_cold", "read_warm"), {"capture": 500.0, "persist": 250.0, "load": 200.0}
RATES = dict.fromkeys(MACHINE, 1000.0) | OURS
LIMITS = {f"{name}_bytes_per_s": rate for name, rate in RATES.items()} | {"bytes": 100}


def test_comparison_with_best_blocking_peer_and_machine():
    summaries = {
        "ours-disk": a_save(stall_s=0.1),
        "ours-blocking": a_save(stall_s=0.3),
        "torch-sync": a_save(stall_s=2.0),
        "mcore-sync": a_save(stall_s=4.0),
        "mcore-async": a_save(stall_s=0.2),
    }
    told = report.ratios(summaries, LIMITS)
    assert told == pytest.approx(dict(stall_ratio=0.05, capture_ratio=0.5, persist_ratio=0.25, load_ratio=0.2))


def test_engine_costs_are_relative_to_blocking_save():
    summaries = {
        "zero2-memory": a_save(stall_s=0.1, durable_s=1.0),
        "zero2-disk": a_save(stall_s=0.2, bytes=50, durable_s=1.0),
        "deepspeed-blocking": a_save(stall_s=0.4, durable_s=4.0),
    }
    told = report.beside(summaries)
    assert told["zero2-memory"] == pytest.approx(dict(stall_s=0.25, bytes=1.0))  # what stays in memory has no rate
    assert told["zero2-disk"] == pytest.approx(dict(stall_s=0.5, bytes=0.5, bytes_per_s=2.0))
    assert report.beside({"zero2-disk": a_save()}) == {}


def test_unmeasured_cases_are_not_compared():
    assert report.ratios({"torch-sync": a_save()}, None) == {}
    assert report.ratios({"ours-disk": a_save(stall_s=0.1)}, None) == {}


def events(*, saves=(3, 6)) -> list[dict]:
    iterations = [dict(type="iteration", iteration=i, time=10.0 * i, elapsed_s=10.0) for i in range(1, 9)]
    stalls = [dict(type="stall", iteration=i, time=0.0, cause="snapshot", seconds=s) for i in saves for s in (0.1, 0.3)]
    taken = [dict(type="snapshot", iteration=i, time=10.0 * i + 2, bytes=7, copy_s=1.0) for i in saves]
    written = [dict(type="persist", iteration=i, time=10.0 * i + 6, bytes=7, write_s=3.0) for i in saves]
    start = [dict(type="start", iteration=0), dict(type="resume", iteration=8, seconds=1.5)]
    return [*start, *iterations, *stalls, *taken, *written]


def test_round_spans_consecutive_saves(tmp_path):
    told = ours.rounds(events(), Plan(tmp_path, saves=1, every=3, plain=2))
    assert [r["round_s"] for r in told["rounds"]] == [30.0]
    assert told["first"] == pytest.approx(
        dict(stall_s=0.4, round_s=30.0, complete_s=6.0, unsynced_s=0.0, bytes=7, capture_s=1.0, persist_s=3.0)
    )


def test_memory_snapshot_completes_after_all_copies(tmp_path):
    in_memory = [e for e in events() if e["type"] != "persist"]
    told = ours.rounds(in_memory, Plan(tmp_path, saves=1, every=3, plain=2))
    assert told["first"]["complete_s"] == 2.0 and told["first"]["persist_s"] == 0.0


def test_missing_snapshot_or_load_event_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="snapshot .* 6"):
        ours.rounds(events(saves=[3]), Plan(tmp_path, saves=1, every=3, plain=2))
    with pytest.raises(ValueError, match="no resume"):
        ours.load_seconds([])


def test_flags_give_as_many_iterations_as_are_read(tmp_path):
    flags = ours.saving_flags("--ckpt-tier disk", Plan(tmp_path, saves=1, every=3, plain=2), tmp_path, "/memory")
    iterations = int(flags[flags.index("--train-iters") + 1])
    assert [e["iteration"] for e in events() if e["type"] == "iteration"] == [*range(1, iterations + 1)]


def test_iterations_without_saves_exclude_warm_up(tmp_path):
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events()))
    assert len(ours.plain_seconds(read_events(tmp_path))) == 8 - rounds.WARM_UP
    assert ours.load_seconds(read_events(tmp_path)) == 1.5


def test_deepspeed_is_excluded_only_where_it_cannot_run():
    blocking = cases.CASES["deepspeed-blocking"]
    assert "--deepspeed-python" in cases.left_out(blocking, "DP4xEP2", None)
    assert cases.left_out(blocking, "DP4xEP2", "0.19.8") is None
    assert "pipeline" in cases.left_out(blocking, "PP2xEP2", "0.19.8")
    assert "no pipeline" in cases.left_out(cases.CASES["zero2-disk"], "PP2xEP2", "0.19.8")
    assert cases.left_out(cases.CASES["torch-sync"], "PP2xEP2", None) is None


def test_state_takes_12_bytes_per_parameter():
    assert save_stall.state_bytes(cases.model_flags(quick=False)) == 12 * 151_045_120


def test_worker_failure_error_contains_output(tmp_path):
    with pytest.raises(save_stall.RunFailed, match=r"3(.|\n)*the reason"):
        save_stall.launch([sys.executable, "-c", "import sys; print('the reason'); sys.exit(3)"], tmp_path)


def test_plot_and_table_contain_every_case(tmp_path):
    from rich.console import Console

    summaries = {
        name: report.summary({"rounds": [a_save()], "first": a_save()}, every=3, plain_s=[3.0]) for name in cases.CASES
    }
    told = {"cases": summaries, "ratios": {"stall_ratio": 0.2}, "limits": LIMITS, "left_out": {}}
    told["beside"] = report.beside(summaries)
    report.plot({"DP4xEP2": told}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    console = Console(width=200, record=True, file=open("/dev/null", "w"))
    console.print(report.table("DP4xEP2", told))
    text = console.export_text()
    assert all(case.label in text for case in cases.CASES.values())
    assert any("missed" in line for line in report.lines(told))
