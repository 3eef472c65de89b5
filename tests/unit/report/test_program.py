"""What the report says of a run, from events that a run could have written."""

import json
import random
import re
import subprocess
import sys

import pytest

from moc.report import report as tool
from moc.report.figures import NoProgress, compute_report
from moc.report.report import table_sections
from moc.report.run_state import RunFold, fold_events
from tests.cases import each_row
from tests.unit.conftest import REPOSITORY

STEP = 1.0  # seconds of an undisturbed iteration


class Story:
    """Writes events as a run does; all times are sums of powers of two."""

    def __init__(self):
        self.now, self.iteration, self.events = 1000.0, 0, []

    def tell(self, kind, after=0.0, **fields):
        self.now += after
        self.events.append({"type": kind, "time": self.now, **fields})
        return self

    def start(self, after=4.0, iteration=None, startup=4.0, workers=4):
        self.iteration = self.iteration if iteration is None else iteration
        phases = {"import": startup / 2, "load": startup / 2}
        return self.tell("start", after, iteration=self.iteration, world_size=workers, startup_s=phases)

    def train(self, *seconds, **fields):
        for elapsed in seconds:
            self.iteration += 1
            facts = {"iteration": self.iteration, "loss": 8.0 / self.iteration, "grad_norm": 1.0, "tokens": 100}
            self.tell("iteration", elapsed, elapsed_s=elapsed, **facts | fields)
        return self

    def usual(self, count=10, **fields):
        return self.train(*[STEP] * count, **fields)

    def resume(self, after, tier="memory", kept=0, **fields):
        return self.tell("resume", after, tier=tier, seconds=after / 2, kept=kept, **fields)

    def generation(self, after, noticed=0.125, **losses):
        reason = "worker 2 was killed by signal 9"
        lost = {"cause": "worker-lost", "rank": 2, "node": 1, "signal": 9} | losses
        return self.tell("generation", after, reason=reason, noticed_s=noticed, met_s=after - noticed, **lost)

    @property
    def report(self):
        return compute_report("run", self.events)


def spent(run):
    """The parts of the wall clock that there are."""
    parts = {name.removesuffix("_s"): seconds for name, seconds in vars(run.spent).items() if seconds}
    assert sum(parts.values()) == run.wall_s
    return parts


def test_failed_writes_are_counted():
    story = Story().start().usual().tell("save_skipped", iteration=4).tell("log_failed", what="events", lost=0)
    for what in ("snapshot", "snapshot", "checkpoint"):
        story.tell("save_failed", what=what, iteration=5)
    run = story.report
    assert run.not_written == {"snapshot": 2, "checkpoint": 1, "skipped": 1, "log": 1}
    told = dict(dict(table_sections([run]))["could not be written"])
    assert told["snapshots"] == ["2"] and told["snapshots, storage being too slow"] == ["1"]
    assert told["checkpoints"] == ["1"] and told["logs, for a while"] == ["1"]


def test_generations_without_progress_count_devices():
    story = Story().generation(1.0, lost_devices=[[0, 1]]).generation(1.0, lost_devices=[[0, 1]] * 2).start().usual(6)
    for after, devices in ((6, [[1, 1]]), (6, [[1, 1], [1, 1]]), (6, [[1, 1], [1, 1], [0, 3]]), (7, [[0, 0]])):
        story.generation(1.0, lost_after=after, lost_devices=devices).start(1.0)
    story.usual(2).generation(1.0, lost_after=9, lost_devices=[[2, 0]]).start(1.0)
    run = story.generation(1.0, lost_after=9, lost_devices=[[2, 0], [2, 0]]).start(1.0).usual(1).report
    startup, *later = run.standstills
    assert startup == NoProgress(-1, 1, ((0, 1),))
    assert later == [NoProgress(6, 2, ((1, 1), (0, 3))), NoProgress(9, 1, ((2, 0),))]
    (cell,) = dict(dict(table_sections([run]))["faults and recoveries"])["generations without progress"]
    assert cell.splitlines()[1:] == ["2 after iteration 6: device 1 of node 1, device 3 of node 0"] + [
        "1 after iteration 9: device 0 of node 2"
    ]


def test_run_without_faults_has_no_recoveries():
    story = Story().start().usual(9).tell("stall", seconds=0.25).train(1.5)
    story.tell("evaluation", 2.0, split="valid", loss=5.0, iteration=10).tell("save", 3.0, elapsed_s=3.0)
    run = story.usual().tell("exit", 1.0, reason="done", code=0).report
    assert spent(run) == {"start_up": 4, "useful": 20, "stalls": 0.25, "slower": 0.25, "pauses": 6}
    assert (run.wall_s, run.ettr, run.iteration_s) == (30.5, 20 / 30.5, STEP)
    assert (run.tokens, run.tokens_per_s, run.workers) == (2000, 2000 / 30.5, 4)
    assert (run.ended, run.validation, run.loss.first, run.loss.last) == ("done", {"valid": 5.0}, 8.0, 0.4)
    assert run.recoveries.count == 0 and run.saving is None


def test_stopped_time_starts_at_loss_that_ended_job():
    story = Story().start().usual(4).tell("end", 1.0, reason="worker lost", code=1)
    assert fold_events(story.events).ended == "worker lost"
    run = story.start(10.0, iteration=4).usual(2).report
    assert spent(run) == {"start_up": 4, "useful": 6, "recoveries": 1 + 4, "stopped": 6} and run.ended is None


def test_repeated_iterations_are_counted_once_as_useful():
    story = Story().start().usual(10).tell("inject", 0.25, action="kill", rank=2).generation(0.5)
    run = story.resume(1.0, kept=0).start(0.25, iteration=8).train(3.0).usual(9).report
    # 9 and 10 do not count, and of the first iteration after it what is usual
    assert spent(run) == {"start_up": 4, "useful": 18, "again": 2, "recoveries": 0.25 + 0.5 + 1 + 0.25 + 2}
    (one,) = run.each
    assert (one.newest, one.iteration, one.undone, one.replayed, one.exact) == (10, 8, 2, 0, True)
    assert (one.outside_s, one.detect_s, one.kept, one.workers) == (6.0, 0.125, 0, 4)
    assert [(loss.rank, loss.node, loss.signal) for loss in one.losses] == [(2, 1, 9)]
    assert (run.iterations, run.computed, run.tokens, run.ended) == (18, 20, 1800, None)
    assert run.recoveries.injected == {"kill": 1}


def test_incident_has_its_cause_and_seconds_of_each_phase():
    story = Story().start().usual(10).tell("inject", 0.25, action="kill", rank=2).generation(0.5)
    story.tell("replay", 0.5, iteration=10, seconds=0.5, frozen=0)
    story.tell("resume", 0.5, tier="memory", seconds=1.0, kept=0).start(0.25, iteration=8)
    (one,) = story.train(3.0).usual(9).report.each
    assert (one.newest, one.repeated) == (10, 3)
    phases = {"detection": 0.125, "reconnection": 0.375, "load": 0.5, "replay": 0.5, "first iteration": 2.25}
    assert one.phases == phases
    (row,) = tool.incident_rows([one], (), 0)
    cells = dict(zip(tool.INCIDENT_TITLES, row, strict=True))
    assert (cells["worker"], cells["node"], cells["cause"]) == ("2", "1", "worker-lost, signal 9")
    assert (cells["load"], cells["repeated"], cells["iteration"]) == ("500 ms", "3", "10")


def test_differing_repeated_iterations_are_not_exact():
    story = Story().start().usual(10).generation(0.5).resume(1.0).tell("lost", raised_by=0.0, plt=0.0)
    again = story.start(iteration=9).train(STEP, loss=0.75).usual(1)
    assert again.report.each[0].exact is False and again.report.recoveries.not_exact == 1
    lossy = Story().start().usual(10).generation(0.5).tell("lost", raised_by=0.25, plt=0.25).resume(1.0)
    run = lossy.start(iteration=10).usual(2).report
    assert (run.each[0].exact, run.each[0].lost_tokens, run.recoveries.not_exact) == (None, 0.25, 1)


def test_replay_by_some_stages_is_reported():
    story = Story().start().usual(10).generation(0.5)
    for number, exact in ((8, None), (9, True), (10, True)):
        story.tell("replay", 0.5, iteration=number, seconds=0.5, frozen=0, stages=[1], exact=exact)
    run = story.resume(2.0, tier="storage", kept=3, stages=[1]).start(0.5).usual(10).report
    assert spent(run) == {"start_up": 4, "useful": 20, "again": 1.5, "recoveries": 3.0}
    (one,) = run.each
    assert (one.kept, one.stages, one.undone, one.replayed, one.repeated, one.exact) == (3, (1,), 0, 3, 3, True)
    assert one.outside_s == 4.5 and run.recoveries.alone == 1


def test_iteration_unreported_by_lost_worker_counts_as_useful():
    story = Story().start().usual(10).generation(2.0).resume(0.5, kept=3)
    run = story.train(0.0).start(0.25).usual(4).report  # it had been computed, within these two seconds
    assert spent(run) == {"start_up": 4, "useful": 15, "recoveries": 1.75}
    assert (run.iterations, run.each[0].iteration, run.each[0].outside_s) == (15, 11, 1.75)


def test_discarded_iteration_before_detection():
    story = Story().start().usual(10).tell("inject", action="kill", rank=2).usual(1).generation(0.5).resume(1.0)
    run = story.start(0.25, iteration=10).usual(2).report
    assert spent(run) == {"start_up": 4, "useful": 12, "again": 1, "recoveries": 1.75}
    assert [(one.undone, one.outside_s) for one in run.each] == [(1, 2.75)]


def test_second_loss_belongs_to_interrupted_recovery():
    story = Story().start().usual(10).generation(1.0).resume(1.0).start(1.0).generation(1.0).resume(1.0)
    run = story.start(1.0, iteration=9).usual(4).report
    assert spent(run) == {"start_up": 4, "useful": 13, "again": 1, "recoveries": 6}
    assert [(one.undone, one.outside_s, len(one.losses)) for one in run.each] == [(1, 7.0, 2)]


def test_losses_without_an_event_of_their_own_are_incidents():
    earlier = [dict(generation=1, cause="node-lost", reason="node 3 is lost", node=3)]
    earlier.append(dict(generation=2, cause="worker-lost", reason="worker 0 was killed", rank=0, node=0, signal=9))
    story = Story().start().usual(10).generation(1.0, earlier=earlier).resume(1.0).start(1.0, iteration=9)
    (one,) = story.usual(4).report.each
    rows = [dict(zip(tool.INCIDENT_TITLES, row, strict=True)) for row in tool.incident_rows([one], (), 0)]
    assert [(row["worker"], row["node"], row["cause"]) for row in rows] == [
        ("", "3", "node-lost"),
        ("0", "0", "worker-lost, signal 9"),
        ("2", "1", "worker-lost, signal 9"),
    ]
    assert [row["repeated"] for row in rows] == ["1", "", ""]
    state = fold_events(story.tell("end", 1.0, reason="worker 0 was killed", code=137, earlier=earlier[1:]).events)
    (fatal,) = tool.incident_rows((), state.unrecovered, state.last_iteration)
    assert fatal[1:5] == ["13", "0", "0", "worker-lost, signal 9"]
    assert state.counts["loss", "worker-lost"] == 3 and [loss.rank for _, loss in state.losses] == [None, 0, 2, 0]


def test_repeated_loss_counts_for_latest_failure():
    story = Story().start().usual(10)
    for _ in range(2):
        story.generation(1.0).resume(1.0).start(1.0, iteration=9).usual(2)
    run = story.report
    assert spent(run) == {"start_up": 4, "useful": 11, "again": 3, "recoveries": 6}
    assert [(one.undone, one.outside_s) for one in run.each] == [(1, 4.0), (2, 5.0)]


def test_restart_after_kill_is_recovery():
    story = Story().start().usual(10).tell("inject", 0.5, action="kill", rank=0)
    run = story.resume(8.0, tier="storage").start(2.0, startup=4.0).usual(4).report
    assert spent(run) == {"start_up": 4, "useful": 14, "stopped": 6, "recoveries": 4.5}
    assert [([loss.rank for loss in one.losses], one.outside_s) for one in run.each] == [([0], 10.5)]


def test_restart_after_exit_is_pause():
    story = Story().start().usual(10).tell("exit", 1.0, reason="signal", code=75)
    run = story.resume(3600.0, tier="storage").start(1.0, startup=4.0).usual(4).report
    assert spent(run) == {"start_up": 8, "useful": 14, "pauses": 1}
    assert run.recoveries.count == 0 and run.ended is None


def test_policy_change_is_no_recovery():
    story = Story().start().usual(10).tell("choice", iteration=10, ckpt_policy="full", cause="c", reason="r")
    run = story.resume(0.5, tier="live", kept=4).start(0.5, startup=20.0).usual(4).report
    assert spent(run) == {"start_up": 5, "useful": 14} and run.recoveries.count == 0
    (choice,) = run.choices
    assert (choice.iteration, choice.chosen, choice.cause, choice.reason) == (10, {"ckpt_policy": "full"}, "c", "r")


def test_unfinished_recovery_is_reported():
    for tier in ("memory", "live"):
        run = Story().start().usual(10).generation(2.0).resume(1.0, tier=tier).start(1.0).report
        assert spent(run) == {"start_up": 4, "useful": 10, "recoveries": 4} and not run.each


def random_stories(seeds):
    """Yields stories with losses, restarts and exits, and the seconds in which each job was down after an exit."""
    for seed in seeds:
        dice, story, away = random.Random(seed), Story().start().usual(1), 0.0
        for _ in range(dice.randrange(1, 12)):
            what = dice.choice("train stall pause lose again end".split())
            back = dice.randrange(story.iteration + 1)
            if what == "train":
                story.train(*[dice.choice((0.5, 1.0, 1.25)) for _ in range(dice.randrange(1, 9))])
            elif what == "stall":
                story.tell("stall", 0.125, seconds=0.125).train(1.5)
            elif what == "pause":
                story.tell("evaluation", 2.0, split="valid", loss=1.0)
            elif what == "lose":
                story.generation(1.0).resume(0.5).start(0.25, iteration=back)
            elif what == "again":
                story.resume(8.0, tier="storage").start(1.0, iteration=back)
            else:
                story.tell("exit", 0.5, reason="signal").resume(16.0).start(1.0, iteration=back)
                away += 13.0
        yield story.train(0.5), away


def test_parts_add_up_to_wall_clock():
    for story, away in random_stories(range(200)):
        run = story.report
        assert sum(spent(run).values()) == story.now - run.began - away
        assert all(seconds >= 0 for name, seconds in spent(run).items() if name != "slower")
        assert all(one.outside_s >= 0 for one in run.each)


def test_live_state_equals_state_of_events():
    for story, _ in random_stories(range(40)):
        live = RunFold(keeps_events=False)
        for count, event in enumerate(story.events, 1):
            live.add(event)
            now, read = live.snapshot(), fold_events(story.events[:count])
            names = ("spent", "recoveries", "is_recovering", "tokens", "computed", "iteration_s", "periods", "ended")
            assert [getattr(now, name) for name in names] == [getattr(read, name) for name in names]
            assert now.iterations.keys() == read.iterations.keys()


def saved():
    """A run that protects itself in every way, with one lost node."""
    story = Story().tell("placement", replicas=1, survival={"1": 1.0, "2": 0.5}).start()
    for number in range(1, 11):
        drops = {"dropped_share": 0.0625, "dropped_share_by_layer": {"0": 0.125, "2": 0.0}}
        loads = {"max_violation": 0.5, "max_violation_by_layer": {"0": 0.25, "2": 0.5}} | drops if number == 4 else {}
        skew = loads | {"hhi": 0.125 * (1 + number % 2), "skewness": number / 100, "plt": 0.0, "sparse_window": 3}
        story.usual(1, upstream_log_bytes=1000.0 * number, upstream_log_iterations=2.0, **skew)
        taken = dict(tier="peers", bytes=1_000_000, copy_s=0.25, hash_s=0.5)
        story.tell("snapshot", iteration=number, **taken, **({"bubble_bytes": 800_000} if number % 2 else {}))
        copies = dict(bytes=2_000_000, replicate_s=0.125, not_sent_bytes=1_000_000)
        story.tell("stall", seconds=0.0625).tell("replicate", iteration=number, **copies)
    story.tell("persist", iteration=5, bytes=1_000_000, write_s=1.0, publish_s=0.5)
    story.tell("choice", iteration=10, sparse_window=3, reason="it is hidden")
    story.generation(0.5).tell("restore", iteration=10, of=1, held_by=0).resume(0.5, kept=0)
    story.tell("lost", iteration=10, plt=0.25, raised_by=0.25, by_layer={"1": 0.125, "3": 0.375})
    story.tell("boost", iteration=10, boosted=True, tokens=2000, made_up=0, left=200)
    return story.start(0.5).usual(1, plt=0.25, hhi=0.5, skewness=0.5, tokens_owed=800)


def lines(*runs):
    return {f"{section}/{name}": cells for section, filled in table_sections(runs) for name, cells in filled}


def test_table_has_figures_of_run():
    told = {name: cells[0] for name, cells in lines(saved().report).items()}
    assert told["experts/HHI: first, last, mean"] == f"0.2500, 0.5000, {(5 * 0.125 + 5 * 0.25 + 0.5) / 11:.4f}"
    assert told["experts/skewness: first, last, mean"] == "0.0100, 0.5000, 0.0955"
    assert told["experts/tokens lost (PLT): first, last, mean"] == "0.00 %, 25.00 %, 2.27 %"
    assert told["experts/maximum violation: first, last, mean"] == "0.5, 0.5, 0.5"
    assert told["experts/highest layers at the end"] == "2: 0.5, 0: 0.25"
    assert told["experts/layers that drop most at the end"] == "0: 12.50 %"
    assert told["experts/most of them"] == "37.50 % in layer 3, 12.50 % in layer 1"
    assert told["experts/of the newest, made up by more capacity"] == "1,200 of 2,000"
    assert told["upstream logs/bytes: mean, most"] == "5.5 kB, 10.0 kB"
    assert told["snapshots/tier"] == "peers" and told["snapshots/taken"] == "10"
    assert told["snapshots/bytes an iteration, to host memory"] == "909.1 kB"  # 11 iterations
    assert told["snapshots/bytes an iteration, to peers"] == "1.8 MB"
    assert told["snapshots/not sent, identical on the peers"] == "909.1 kB"
    assert told["snapshots/copied in bubbles"] == "40.0 %" and told["snapshots/copy, hash"] == "250 ms, 500 ms"
    assert told["snapshots/replicated"] == "10 in 125 ms each"
    assert told["snapshots/written and published"] == "1 in 1.50 s each"
    assert told["snapshots/survival, by number of lost nodes"] == "1: 100 %, 2: 50 %"
    assert told["snapshots/of lost nodes, from others"] == "1"
    assert told["faults and recoveries/losses computed again"] == "1 not"
    assert told["policy/window W"] == "3"
    assert "where the time went/until started again" not in told


def test_selective_experts_and_tokens_at_risk_are_reported():
    story = Story().start().usual(1)
    for risk in (1.0, 3.0):
        gauges = {"selective_experts": 8.0, "selective_copies": 2 + risk, "selective_gradients": 2 * risk}
        story.usual(1, **gauges, mlt=risk, mlt_peers=2 * risk)
        story.tell("snapshot", iteration=story.iteration, tier="peers", bytes=1000, copy_s=0.25, hash_s=0.5)
        story.tell("fold", iteration=story.iteration, folded=3, gradients=9, equal=0, differing=0, seconds=0.5)
    told = {name: cells[0] for name, cells in lines(story.report).items()}
    assert told["snapshots/experts of each layer (S): mean, most"] == "8, 8"
    assert told["snapshots/of these, copied to other nodes: mean, most"] == "4, 5"
    assert told["snapshots/of these, saved as gradients"] == "50.0 %"
    assert told["snapshots/bases updated in the background"] == "6"
    assert told["experts/at risk (MLT), in iterations: mean, most"] == "2, 3"
    assert told["experts/at risk with a node's memory: mean, most"] == "4, 6"
    plain = lines(saved().report)
    assert not any("gradients" in name or "(S)" in name or "at risk" in name or "folded" in name for name in plain)


def test_missing_storage_state_is_reported():
    story = Story().start().usual(1)
    for age in (2.0, 6.0):
        story.usual(1, storage_age=age, storage_overdue=age - 2, mlt_storage=age / 2)
    told = {name: cells[0] for name, cells in lines(story.report).items()}
    assert told["missing from storage/iterations: mean, most"] == "4, 6"
    assert told["missing from storage/operators older than promised: mean, most"] == "2, 4"
    assert told["experts/at risk with all memory: mean, most"] == "2, 3"
    assert not any("missing from storage" in name for name in lines(saved().report))


def test_compensated_tokens_are_reported_after_boost():
    story = saved().tell("boost", iteration=11, boosted=False, tokens=2000, made_up=1900, left=0)
    assert story.usual(1).report.made_up == (1900, 2000)
    assert Story().start().usual(2).report.made_up is None


def test_runs_are_compared_in_columns():
    told = lines(saved().report, Story().start().usual().report)
    assert told["run/iterations"] == ["11 (1 to 11)", "10 (1 to 10)"]
    assert told["snapshots/taken"] == ["10", ""]
    assert "faults and recoveries/injected" not in told


@pytest.fixture
def log(tmp_path):
    """Writes events to where a run would."""

    def write(story, name, torn=""):
        directory = tmp_path / name
        directory.mkdir()
        written = [json.dumps(event) for event in story.events]
        (directory / "events.jsonl").write_text("\n".join([*written[:-1], torn, *written[-1:], torn]))
        return directory

    return write


def test_report_program_writes_figures_and_pictures(log, tmp_path, capsys):
    plain, faulty = log(Story().start().usual(), "plain"), log(saved(), "faulty", torn='{"type": "iterat')
    figures, picture = tmp_path / "out" / "report.json", tmp_path / "out" / "report.png"
    paths = [str(plain / "events.jsonl"), str(faulty)]
    assert tool.main([*paths, "--json", str(figures), "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert plain.name in out and "skewness" in out and "at iteration 10: sparse_window 3\n    it is hidden" in out
    first, second = json.loads(figures.read_text())
    assert (first["name"], first["ettr"], second["iterations"]) == (str(plain), 10 / 14, 11)
    assert second["each"][0]["lost_tokens"] == 0.25 and second["gauges"]["skewness"]["last"] == 0.5
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in figures.parent.iterdir()) == ["report.json", "report.png", "report_dark.png"]


def test_html_report_is_one_file_with_escaped_text(log, tmp_path):
    hostile = "<script src='http://evil.example'></script>\udcff"
    story = saved().tell("choice", iteration=11, ckpt_policy=hostile, reason=hostile).usual(1)
    output = tmp_path / "report.html"
    assert tool.main([str(log(story, "run & <b>")), "--html", str(output)]) == 0
    html = output.read_text()
    assert "<script" not in html and "&lt;script" in html and "<b>" not in html
    assert {reference[:11] for reference in re.findall(r'(?:src|href)="([^"]*)"', html)} == {"data:image/"}
    assert "worker-lost, signal 9" in html and "until started again" not in html


def test_torn_first_line_and_iteration_without_duration_are_read(tmp_path, capsys):
    story = Story().start().train(0.0).tell("save", 1.0, elapsed_s=1.0)
    lines = ['{"type": "mem', *map(json.dumps, story.events)]
    (tmp_path / "events.jsonl").write_text("\n".join(lines))
    assert tool.main([str(tmp_path)]) == 0 and "undisturbed" in capsys.readouterr().out


def test_figures_are_readable_numbers():
    assert [tool.seconds(value) for value in (0.9996, 0.9994, 3600.0)] == ["1.00 s", "999 ms", "1.00 h"]
    story = Story().start().usual(10).generation(1.0).resume(1.0, kept=9999).start(1.0).usual(2)
    told = {name: cells[0] for name, cells in lines(story.report).items()}
    assert told["faults and recoveries/workers that kept their state: mean, most"] == "9,999, 9,999"


@each_row(
    ("written", "message"),
    [
        (None, "events.jsonl: No such file"),
        ("loss: 3\n", "[events-invalid]"),
        ('{"type": "exit", "time": 1.0, "iteration": 0}\n', "[run-too-short]"),
        ('{"type": "iteration", "time": 1.0, "iteration": 1}\n', "elapsed_s"),
    ],
)
def test_user_errors_are_one_sentence(tmp_path, capsys, written, message):
    if written is not None:
        (tmp_path / "events.jsonl").write_text(written)
    assert tool.main([str(tmp_path / "events.jsonl")]) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_report_starts_without_torch():
    code = "import sys, moc.report.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0
