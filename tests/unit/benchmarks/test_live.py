"""From what jobs tell to the figures of the benchmarks that kill their workers, attack them, or leave them alone."""

import json
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from benchmarks import generations, wire_fuzz
from benchmarks.live.blocks import SecondHalf, clocked
from benchmarks.live.dcp_job import complete
from benchmarks.live.job import Events, Job
from benchmarks.live.recoveries import NOTICED, OUTSIDE, claims, medians, recovery
from benchmarks.live.slices import ratios, slices, warm_up
from tests.cases import each_row

KILLED, USUAL = 100.25, 0.5


def iteration(number: int, time: float) -> dict:
    return {"type": "iteration", "iteration": number, "time": time}


EVENTS = [
    {"type": "resume", "time": 90.0, "iteration": 0, "seconds": 0.1},  # after an earlier kill
    iteration(6, 99.5),
    iteration(7, 100.0),
    {"type": "generation", "time": 100.5, "noticed_s": 0.01, "met_s": 0.2},
    {"type": "resume", "time": 101.0, "iteration": 6, "seconds": 0.1},
    {"type": "start", "time": 101.1, "startup_s": {"meet": 9.0, "load": 0.4}},
    iteration(7, 101.75),
    iteration(8, 102.25),
]
SAID = [
    (99.0, "mocrun: generation 1: worker 0 was killed by signal 9"),
    (100.3, "mocrun: generation 2: worker 3 was killed by signal 9"),
]


def of(events, said=SAID, killed=KILLED) -> dict | None:
    return recovery(events, said, NOTICED["ours"], killed, USUAL)


def test_recovery_chain_spans_kill_to_first_new_iteration():
    told = of(EVENTS)
    assert told == pytest.approx(
        {
            "detected": 0.05,
            "survivors unblocked": 0.05,
            "first collective": 0.45,
            "planned": 0.65,
            "loaded": 0.75,
            "first iteration": 1.5,
            OUTSIDE: 2.25 - USUAL,  # from the end of 7 to the end of 8, for the first time
            "iterations again": 1,
        }
    )


def test_incomplete_recovery_chain_is_ignored():
    for end in range(len(EVENTS)):
        assert of(EVENTS[:end]) is None
    assert of(EVENTS, SAID[:1]) is None


def test_iteration_ending_after_kill_is_useful_work():
    late = [*EVENTS[:3], iteration(8, 100.4), *EVENTS[3:], iteration(9, 103.0)]
    assert of(EVENTS[:3] + [iteration(8, 100.4)] + EVENTS[3:]) is None  # 8 has been there before
    assert of(late)[OUTSIDE] == pytest.approx(103.0 - 100.4 - USUAL)
    assert of(late)["iterations again"] == 2


def test_chain_without_generation_event_omits_unblocked_time():
    told = of([event for event in EVENTS if event["type"] != "generation"])
    assert "survivors unblocked" not in told and told["detected"] == pytest.approx(0.05)
    assert medians([told, of(EVENTS)])["survivors unblocked"] == pytest.approx(0.05)


def test_launcher_loss_messages_are_recognized():
    assert not NOTICED["ours"].search(" [2026-01-01 00:00:00] generation 2: worker 1 was killed by signal 9; all met")
    line = "E0101 00:00:00.000000 7 torch/api.py:900] failed (exitcode: -9) local_rank: 1 (pid: 8) of binary: python"
    assert NOTICED["torchrun"].search(line)


def test_only_measured_cases_make_claims():
    ours = {"detected": 0.05, "first collective": 0.4, OUTSIDE: 0.7}
    assert set(claims({"ours, memory": ours}).values()) == {True} and len(claims({"ours, memory": ours})) == 2
    assert all(claims({"ours, memory": ours, "torchrun, disk": {OUTSIDE: 7.0}}).values())
    slow = {"detected": 0.2, "first collective": 1.0, OUTSIDE: 0.71}
    assert not any(claims({"ours, memory": slow, "torchrun, disk": {OUTSIDE: 7.0}}).values())


def test_events_are_read_incrementally_without_torn_lines(tmp_path):
    path = tmp_path / "events.jsonl"
    events = Events(path)
    assert events.all() == []
    with open(path, "ab", buffering=0) as file:
        file.write(json.dumps(iteration(1, 1.0)).encode() + b'\n{"type": "iter')
        assert [e["iteration"] for e in events.of("iteration")] == [1]
        file.write(b'\n{"type": "iteration", "iteration": 2')
        assert len(events.all()) == 1
        file.write(b', "time": 2.0}\n')
    assert [e["iteration"] for e in events.of("iteration")] == [1, 2] and events.of("resume") == []


def test_torch_checkpoint_counts_once_metadata_exists(tmp_path):
    for number in (2, 1, 3):
        (tmp_path / f"iter_{number:07d}").mkdir()
    for number in (1, 2):
        (tmp_path / f"iter_{number:07d}" / ".metadata").touch()
    assert [path.name for path in complete(tmp_path)] == ["iter_0000001", "iter_0000002"]


def test_growing_resource_is_named_but_warm_up_is_not():
    flat = [{"uss_mb": 100.0 + min(i, 10) * 5, "rss_mb": 300.0, "threads": 40, "descriptors": 20} for i in range(41)]
    leaking = [one | {"descriptors": 20 + i} for i, one in enumerate(flat)]
    found = {who: generations.slopes(samples) for who, samples in {"agent": flat, "worker": leaking}.items()}
    assert found["worker"]["descriptors"] == pytest.approx(1.0)
    assert generations.creeping(found) == ["worker: descriptors"]


def test_ratio_compares_within_rounds():
    rounds = [
        {"torchrun": [1.0, 1.0, 1.0], "ours, interval 1": [2.0, 2.0, 2.0], "ours, interval 50": [1.0, 1.0, 4.0]},
        {"torchrun": [3.0, 3.0, 3.0], "ours, interval 1": [3.0, 3.0, 3.0], "ours, interval 50": [3.0, 3.0, 3.0]},
    ]
    told = ratios(rounds, "torchrun")
    assert told["torchrun"]["median"] == {"median": 1.0, "rounds": [1.0, 1.0]}
    assert told["ours, interval 1"]["median"] == {"median": 0.75, "rounds": [0.5, 1.0]}
    assert told["ours, interval 50"]["median"]["median"] == 1.0  # what few iterations pay is not in medians
    assert told["ours, interval 50"]["mean"]["rounds"] == [0.5, 1.0]


PROGRAM = """
import json, pathlib, sys, time
log = pathlib.Path(sys.argv[-1])
log.mkdir()
last = time.time()
with open(log / "events.jsonl", "a", buffering=1) as file:
    for iteration in range(1, 100000):
        time.sleep(0.01)
        last, begun = time.time(), last
        event = {"type": "iteration", "iteration": iteration, "time": last, "elapsed_s": last - begun}
        print(json.dumps(event), file=file)
"""


def test_jobs_run_only_in_their_own_turns(tmp_path):
    with ExitStack() as stack:
        jobs = {}
        for name in "abc":
            (tmp_path / name).mkdir()
            jobs[name] = stack.enter_context(Job(["-c", PROGRAM], tmp_path / name))
            warm_up(jobs[name], 3)
        before = sum(job.iteration for job in jobs.values())
        rounds = list(slices(jobs, 2, 0.8))
        done = sum(job.iteration for job in jobs.values()) - before
    assert [list(one) for one in rounds] == [list("abc")] * 2
    told = [event["elapsed_s"] for one in rounds for turn in one.values() for event in turn]
    assert max(told) < 0.8, "what a turn has cut is not told"
    assert len(told) < done <= len(told) + 12, "and but for that nothing is done"


SERVER = [{"uss_mb": 9, "descriptors": 9}, {"uss_mb": 10, "descriptors": 12}, {"uss_mb": 10, "descriptors": 12}]


KILLED = "worker 1 was killed by signal 9"
BITS = "it ended with the bits of an undisturbed job"


@each_row(
    ("generation", "last", "told", "broken"),
    [
        ((2, KILLED), {}, {}, set()),
        ((2, "worker 1 has lost connections"), {}, {}, {"the job went on after each kill", "no restart was burnt"}),
        ((1_000_000, KILLED), {}, {}, {"no restart was burnt"}),
        ((2, KILLED), {"descriptors": 13}, {}, {"no descriptors are left"}),
        ((2, KILLED), {"uss_mb": 18}, {}, {"memory grew by less than 8 MB"}),
        ((2, KILLED), {}, {"entered": ["a store"]}, {"the stranger got in nowhere"}),
        ((2, KILLED), {}, {"differences": ["1 of 90 tensors differ"]}, {BITS}),
        ((2, KILLED), {}, {"tensors": 0}, {BITS}),
    ],
)
def test_forbidden_attack_effects_break_verdict(generation, last, told, broken):
    well = {"kills": 2, "entered": [], "tensors": 90, "differences": []}
    well["samples"] = {"agent": [*SERVER[:-1], SERVER[-1] | last]}
    held = wire_fuzz.verdict(well | told, [(1, KILLED), generation])
    assert {what for what, holds in held.items() if not holds} == broken


def test_thread_times_are_measured_by_its_own_clocks(tmp_path):
    class Session:
        def contribution(self):
            end = time.thread_time() + 0.02
            while time.thread_time() < end:
                pass

        def on_totals(self):
            time.sleep(0.03)

        def take(self):
            self.contribution()

        def completed(self, record, begun):
            return SimpleNamespace(iteration=record)

    schedules = SimpleNamespace(
        forward_step=time.sleep, backward_step=lambda seconds: time.sleep(seconds) or "gradients"
    )
    clocked(Session, str(tmp_path / "clocks.jsonl"), SecondHalf(schedules))
    session = Session()
    for iteration in (6, 7):
        for seconds in (0.05, 0.0, 0.01, 0.02):  # of a micro batch
            schedules.forward_step(seconds)
            assert schedules.backward_step(seconds) == "gradients"
        if iteration == 7:
            session.contribution()
            session.on_totals()
        session.completed(iteration, 0.0)
    first, second = Events(tmp_path / "clocks.jsonl").all()
    assert (first["iteration"], second["iteration"]) == (6, 7)
    assert second["code_s"] >= 0.02 and second["away_s"] >= 0.19 and second["wall_s"] >= 0.21
    assert all(0.06 <= told["half_s"] <= told["wall_s"] - 0.1 and told["beside_s"] < 0.06 for told in (first, second))
