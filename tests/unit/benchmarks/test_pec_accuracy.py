"""What is run, what lost tokens are to be expected, and the arithmetic between runs and tables."""

import json
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.accuracy import plots, report, runs
from benchmarks.accuracy.cells import EXPERTS, QUICK, Cell, Plan, cells, expected, expected_plt
from benchmarks.accuracy.results import Results
from megatron.pretraining.entry.offline import config_of_words
from moc.policy.pec_selection import sequential_experts
from moc.policy.pec_tuner import uniform_plt
from moc.policy.token_ledger import TokenLedger
from tests.cases import each_row

PLAN = Plan()
ROOT = Path(__file__).resolve().parents[3]


def test_each_seed_has_every_cell_once():
    wanted = cells(PLAN, seed=7)
    assert len(set(wanted)) == len(wanted) and {cell.seed for cell in wanted} == {7}
    grid = [cell for cell in wanted if cell.kind == "grid"]
    in_turn = {(c.k, c.interval) for c in grid if c.selection == "sequential"}
    assert in_turn == {(k, i) for k in (1, 2, 4, 8) for i in PLAN.intervals}
    assert {(c.k, c.interval) for c in grid if c.selection == "load_aware"} == set(PLAN.by_load) <= in_turn
    assert [c.method for c in wanted if c.kind == "curve"] == ["baseline", "W", "O", "WO", "WO-2L"]


def test_grid_faults_occur_after_all_experts_were_saved():
    for cell in cells(PLAN, seed=1):
        if cell.kind == "grid":
            assert cell.faults == (PLAN.iterations // 2,) and cell.faults[0] % cell.interval == 0
            assert cell.faults[0] // cell.interval > -(-EXPERTS // cell.k) - 1


def test_faults_of_curves_come_when_memory_is_newer_than_storage():
    (cell, *_) = (cell for cell in cells(PLAN, seed=1) if cell.kind == "curve")
    assert cell.faults == (65, 129, 193)
    assert all(fault % cell.interval == cell.interval // 2 for fault in cell.faults)


def test_only_two_levels_have_a_node_that_is_left():
    wo, two_levels = (Cell("curve", 1, method=method) for method in ("WO", "WO-2L"))
    assert [wo.lost_nodes(i) for i in range(2)] == [[0, 1], [0, 1]]
    assert [two_levels.lost_nodes(i) for i in range(3)] == [[0], [1], [0]]
    assert Cell("grid", 1).lost_nodes(0) == []


def test_the_program_understands_the_flags(tmp_path):
    data = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1023"]
    of = {
        c.name: config_of_words([*data, *c.flags(PLAN, tmp_path, tmp_path)], None).snapshot for c in cells(PLAN, seed=1)
    }
    assert of["fault-free"].ckpt_policy is None and of["baseline"].ckpt_policy == "full"
    partial = of["K=2 I=16 load_aware"]
    assert (partial.experts, partial.snapshot_interval, partial.pec_selection) == ((2, 2), "16", "load_aware")
    assert partial.ckpt_blocking and partial.ckpt_tier == "disk"
    assert [of[name].pec_target for name in ("W", "O", "WO", "WO-2L")] == ["weights", "optimizer", "both", "both"]
    curve = of["WO"]
    assert (curve.experts, curve.ckpt_tier, curve.persist_interval) == ((4, 1), "memory", PLAN.curve_interval)


@each_row(
    ("k", "interval", "fault", "iterations", "plt"),
    [
        (1, 2, 16, 32, (0 + 1 + 2 + 3 + 4 + 5 + 6 + 7) * 2 / 8 / 32),
        (4, 16, 128, 256, (4 * 0 + 4 * 1) * 16 / 8 / 256),
        (3, 5, 100, 200, (3 * 0 + 3 * 1 + 2 * 2) * 5 / 8 / 200),
        (1, 4, 12, 24, (0 + 1 + 6 * 2) * 4 / 8 / 24),  # two partial snapshots after the one of everything
        (1, 4, 4, 24, 0.0),  # that one alone
        (8, 4, 12, 24, 0.0),
    ],
)
def test_lost_tokens_by_hand(k, interval, fault, iterations, plt):
    assert expected_plt(k, interval, fault, iterations) == pytest.approx(plt)


@each_row("k", [1, 2, 4, 8])
def test_lost_tokens_to_expect_are_those_of_the_planner_and_of_the_ledger(k):
    interval, fault, iterations = 4, 64, 128
    told = expected_plt(k, interval, fault, iterations)
    assert told == pytest.approx(uniform_plt(EXPERTS, 1 / iterations, 1.0, k, k, interval))
    assert told == pytest.approx(counted(k, interval, fault) * fault / iterations)


def counted(k: int, interval: int, fault: int, layers: int = 2) -> float:
    """The ledger's PLT of a run with equally busy experts, up to a fault right after a snapshot."""
    ledger, saved = TokenLedger.empty(dict.fromkeys(range(layers), EXPERTS)), {}
    for iteration in range(1, fault + 1):
        ledger = ledger.after_iteration(dict.fromkeys(range(layers), [5] * EXPERTS))
        if iteration % interval == 0:
            number = iteration // interval - 2
            chosen = {i: sequential_experts(number, i, k, EXPERTS, 1) for i in range(layers)}
            chosen = chosen if number >= 0 else dict.fromkeys(range(layers), range(EXPERTS))
            ledger = (
                ledger.with_snapshot(chosen, chosen)
                .with_snapshot_completed(iteration)
                .with_persist_completed(iteration)
            )
            saved |= {(layer, expert): iteration for layer, experts in chosen.items() for expert in experts}
    restored = {i: {e: saved[i, e] for e in range(EXPERTS)} for i in range(layers)}
    return ledger.after_recovery(restored).plt()


def test_what_to_expect_of_each_kind_of_run():
    of = {cell.name: expected(cell, PLAN) for cell in cells(PLAN, seed=1)}
    assert of["fault-free"] == of["baseline"] == of["O"] == of["K=8 I=16 sequential"] == 0.0
    assert of["K=1 I=16 sequential"] == pytest.approx(16 * 3.5 / 256)
    assert of["W"] == of["WO"] == pytest.approx(3 * 2 * 3.5 / 256)
    assert of["K=1 I=16 load_aware"] is None and of["WO-2L"] is None


def events(*, lost=((64, 0.1),), last=256) -> list[dict]:
    told = [dict(type="iteration", iteration=i, loss=float(i)) for i in (1, 2)]
    told += [dict(type="iteration", iteration=2, loss=2.5)]  # again, after a fault
    for iteration, plt in lost:
        told.append(dict(type="lost", iteration=iteration, plt=plt))
        told.append(dict(type="resume", iteration=iteration, tier="storage", sources=[[iteration, "storage"]]))
    told += [dict(type="evaluation", iteration=i, split="valid", loss=5.0 - i / 256) for i in (128, last)]
    return told


def test_lost_tokens_are_a_share_of_the_whole_training():
    told = runs.told(events(lost=((64, 0.1), (128, 0.2))), Cell("grid", 1, (65, 129)), PLAN)
    assert told["plt"] == pytest.approx(0.2 * 128 / 256)
    assert told["loss"] == 4.0 and [r["iteration"] for r in told["resumed"]] == [64, 128]
    assert runs.told(events(lost=()), Cell("fault-free", 1), PLAN)["plt"] == 0.0


def test_a_curve_has_what_the_run_went_on_with():
    told = runs.told(events(), Cell("curve", 1, (65,), method="WO"), PLAN)
    assert told["train_losses"] == [1.0, 2.5]
    assert told["evaluations"] == [(128, 4.5), (256, 4.0)]


def test_a_run_without_its_recovery_or_its_end_is_no_sample():
    for told, cell in ((events(lost=()), Cell("grid", 1, (128,))), (events(last=255), Cell("grid", 1, (128,)))):
        with pytest.raises(runs.RunFailed):
            runs.told(told, cell, PLAN)


def test_a_line_that_a_kill_has_cut_off_is_left_out(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"type": "a"}\n{"type": "b", "it\n{"type": "c"}\n')
    assert [event["type"] for event in runs.read_events(tmp_path)] == ["a", "c"]


DYING = """
from benchmarks.accuracy.mortal import die_after
from moc.events import EventLog
die_after(2)
log = EventLog({directory!r})
log.write("other", iteration=2)
for iteration in (1, 2, 3):
    log.write("iteration", iteration=iteration)
"""


@pytest.mark.recovery
def test_a_worker_is_killed_right_after_the_iteration(tmp_path):
    program = DYING.format(directory=str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT)
    assert ended.returncode == -signal.SIGKILL
    told = [(event["type"], event["iteration"]) for event in runs.read_events(tmp_path)]
    assert told == [("other", 2), ("iteration", 1), ("iteration", 2)]


@each_row("dies_after", [None, 5])
def test_a_start_that_ends_in_another_way_is_told_with_what_it_said(dies_after, tmp_path):
    with pytest.raises(runs.RunFailed, match=r"seed 1: (.|\n)*2(.|\n)*--no-such-flag"):
        runs.start(Cell("fault-free", 1), ["--no-such-flag"], tmp_path, dies_after)


def test_text_without_articles_is_refused_by_name(tmp_path):
    (tmp_path / "novel.txt").write_text("It was a dark night.\n" * 100)
    with pytest.raises(runs.RunFailed, match=r"novel.txt has 0 articles.*WikiText"):
        runs.prepare(tmp_path / "novel.txt", tmp_path)
    with pytest.raises(runs.RunFailed, match="nothing.txt"):
        runs.prepare(tmp_path / "nothing.txt", tmp_path)


def sample(cell: Cell, loss: float, plt: float = 0.0) -> dict:
    curve = dict(evaluations=[[128, 5.0], [256, loss]], train_losses=[6.0, loss]) if cell.kind == "curve" else {}
    return json.loads(json.dumps(asdict(cell) | dict(loss=loss, plt=plt, resumed=[]) | curve))


def samples_of(*seeds: int) -> list[dict]:
    """Every cell of some seeds; each costs a tenth per seed, and nothing where nothing is lost."""
    told = []
    for cell in (cell for seed in seeds for cell in cells(PLAN, seed)):
        free = 4.0 + cell.seed + (0.5 if cell.kind == "curve" else 0.0)
        lossless = cell.kind == "fault-free" or cell.method == "baseline" or cell.name == "K=8 I=2 sequential"
        told.append(sample(cell, free if lossless else free + 0.1 * cell.seed, 0.0 if lossless else 0.01))
    return told


def test_differences_are_from_the_run_of_the_same_seed_that_lost_nothing():
    rows = {row["cell"]: row for row in report.summary(reversed(samples_of(1, 3)), PLAN)}
    assert list(rows) == [cell.name for cell in cells(PLAN, seed=0)]
    for name in ("K=1 I=16 sequential", "WO"):
        assert rows[name]["seeds"] == 2
        told = (rows[name]["difference"], rows[name]["lowest"], rows[name]["highest"])
        assert told == pytest.approx((0.2, 0.1, 0.3))
    assert rows["baseline"]["difference"] == 0.0
    alone = [s for s in samples_of(1) if s["method"] == "WO"]
    assert report.summary(alone, PLAN)[0]["difference"] is None


def test_yardsticks():
    told = report.yardsticks(samples_of(1, 3))
    assert told["spread_over_seeds"] == pytest.approx(2**0.5)
    assert told["layout"] == pytest.approx(0.5)
    assert told["full_is_exact"] is False  # of K = 8 only one interval is
    exact = [s for s in samples_of(1, 3) if s["k"] < EXPERTS or s["kind"] != "grid" or s["interval"] == 2]
    assert report.yardsticks(exact)["full_is_exact"] is True
    assert set(report.yardsticks([]).values()) == {None}


def test_lost_tokens_and_loss_are_correlated_where_tokens_were_lost():
    cell = Cell("grid", 1, (128,), 1, 16)
    lossy = [sample(replace(cell, interval=i), 4.0 + 0.01 * i, 0.02 * i) for i in (2, 4, 8)]
    others = [sample(Cell("fault-free", 1), 4.0), sample(replace(cell, k=EXPERTS), 4.9)]
    assert report.yardsticks([*others, *lossy])["correlation"] == pytest.approx(1.0)
    assert report.yardsticks([*others, lossy[0]])["correlation"] is None


def test_how_far_off_lost_tokens_are():
    cell = Cell("grid", 1, (128,), 1, 16)
    plt = 16 * 3.5 / 256
    samples = [sample(cell, 4.0, 1.1 * plt), sample(replace(cell, k=8), 4.0), sample(replace(cell, seed=2), 4.0, plt)]
    assert report.deviations(samples, PLAN) == pytest.approx([0.1, 0.0])


def test_the_table_holds_every_run():
    from rich.console import Console

    console = Console(width=200, record=True, file=open("/dev/null", "w"))
    console.print(report.table(report.summary(samples_of(1), PLAN)))
    text = console.export_text()
    assert all(f" {cell.name} " in text for cell in cells(PLAN, seed=1))
    assert any("last bit" in line or "NOT exactly" in line for line in report.lines(samples_of(1), PLAN, 5.7))


@each_row("samples", [samples_of(1, 2), samples_of(1)[:1], []], ids=["all", "one", "none"])
def test_the_plot_is_drawn_of_what_there_is(samples, tmp_path):
    plots.plot(samples, PLAN, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_what_was_measured_in_the_same_way_is_kept(tmp_path):
    path, setup = tmp_path / "out.json", {"plan": asdict(QUICK), "flags": ["a"]}
    wanted, figures = cells(QUICK, seed=1), lambda samples: {"runs": len(samples)}
    first = Results(setup, path, figures)
    first.resume()  # there is nothing
    first.add(sample(wanted[0], 4.0))
    first.add(sample(wanted[1], 4.1))
    again = Results(setup, path, figures)
    again.resume()
    assert again.samples == first.samples and again.missing(wanted) == wanted[2:]
    with pytest.raises(runs.RunFailed, match="other flags"):
        Results(setup | {"flags": ["b"]}, path, figures).resume()
