"""The arithmetic of the comparison with the public implementation of MoEvement."""

import json

import numpy
import pytest

from benchmarks.peer_moevement import cases, figures

KILLED = 100.0


def event(kind: str, time: float, **fields) -> dict:
    return {"type": kind, "time": time, **fields}


OURS = [
    event("iteration", 99.0, iteration=31, elapsed_s=0.5),
    event("iteration", 100.1, iteration=32, elapsed_s=0.5),  # was complete when the worker was killed
    event("replay", 100.8, iteration=29),
    event("resume", 101.0, iteration=30),
    event("iteration", 101.2, iteration=31, elapsed_s=0.2),
    event("iteration", 101.4, iteration=32, elapsed_s=0.2),
    event("iteration", 101.6, iteration=33, elapsed_s=0.2),
]


def test_an_iteration_is_new_if_it_had_not_been_complete_before():
    told = figures.recovery(OURS, KILLED)
    assert told == pytest.approx({"first_new_s": 1.6, "again": 3, "resume_s": 1.0})
    for end in range(len(OURS)):
        assert figures.recovery(OURS[:end], KILLED) is None


def test_a_public_job_tells_what_it_has_replayed_and_its_last_worker_counts():
    events = [
        event("iteration", 99.0, iteration=31, elapsed_s=0.5),
        event("noticed", 100.2),
        event("noticed", 100.3),
        event("pulled", 105.0),
        event("resume", 105.4, iteration=31, replayed=1),  # who had nothing to compute again
        event("resume", 105.5, iteration=31, replayed=5),
        event("iteration", 106.0, iteration=32, elapsed_s=0.5),
        event("resume", 107.0, iteration=31, replayed=5),  # later than the new iteration: told late
    ]
    expected = {"first_new_s": 6.0, "again": 5, "noticed_s": 0.3, "pulled_s": 5.0, "resume_s": 5.5}
    assert figures.recovery(events, KILLED) == pytest.approx(expected)


def test_bytes_are_of_a_window_in_the_middle_and_of_all_workers():
    ours = [event("snapshot", 0.0, iteration=i, bytes=amount) for i, amount in enumerate((99, 3, 2, 1, 3, 2, 1, 99))]
    assert sorted(figures.snapshot_bytes(ours, 3)) == [1, 2, 3]
    assert figures.snapshot_bytes([*ours, event("snapshot", 0.0, iteration=8, bytes=5)], 3, last=True) == [2, 1, 99]
    public = [event("share", 0.0, iteration=i, bytes=i) for i in (7, 8, 9) for _ in range(4)]
    assert figures.snapshot_bytes(public, 3) == [28, 32, 36]


def test_parameters_count_as_identical_when_all_their_parts_have_the_same_bits():
    state = {("a", "master"): [1.0, 2.0], ("a", "exp_avg"): [0.0], ("b", "master"): [3.0], ("b", "exp_avg"): [4.0]}
    state = {key: numpy.array(values, numpy.float32) for key, values in state.items()}
    same = figures.differences(dict(state), state)
    assert same == {"parameters": 2, "identical": 2, "largest": 0.0, "largest_master": 0.0}
    other = state | {("a", "exp_avg"): numpy.array([-0.0], numpy.float32)}
    assert figures.differences(other, state)["identical"] == 1  # another bit, though not another number
    other = state | {("b", "master"): numpy.array([2.5], numpy.float32), ("a", "exp_avg"): numpy.array([2.0], "f4")}
    assert figures.differences(other, state) == {"parameters": 2, "identical": 0, "largest": 2.0, "largest_master": 0.5}
    with pytest.raises(ValueError, match="the same"):
        figures.differences({}, state)


def test_overhead_is_of_rounds_with_themselves():
    seconds = {"none": [[1.0, 1.0], [2.0, 2.0]], "W=1": [[1.5, 1.5], [2.0, 2.0]]}
    told = figures.overheads(seconds, "none")
    assert told["none"] == {"iteration_s": 1.5, "overhead": 0.0}
    assert told["W=1"] == {"iteration_s": 1.75, "overhead": 0.25}


def test_both_train_the_same_sizes_and_a_case_without_a_window_does_not_save(tmp_path):
    plan = cases.Plan(tmp_path, "python", iterations=60)
    flags = cases.our_flags(cases.Case("ours", 3), plan)
    public = cases.public_flags(cases.Case("public", 3, victim=1), plan, tmp_path)
    shape = json.loads(public[public.index("--shape") + 1])
    assert flags[flags.index("--hidden-size") + 1] == str(shape["hidden"])
    assert flags[flags.index("--global-batch-size") + 1] == str(shape["micro_batch"] * shape["micro_batches"] * 2)
    assert flags[flags.index("--sparse-window") + 1] == public[public.index("--window") + 1] == "3"
    assert public[public.index("--stop-at") + 1] == str(plan.kill_at)
    assert "--ckpt-policy" not in cases.our_flags(cases.Case("ours", 0), plan)
    assert "--stop-at" not in cases.public_flags(cases.Case("public", 3, 1, anywhere=True), plan, tmp_path)


def test_the_end_of_a_public_run_is_put_together_from_flat_parts(tmp_path):
    flat = {0: numpy.arange(8, dtype="f4"), 1: numpy.arange(100, 108, dtype="f4")}  # of stages; the last one is padding
    for rank, (stage, data_rank) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        part = flat[stage][4 * data_rank : 4 * data_rank + 4]
        parts = {f"0/{slot}": part + add for add, slot in enumerate(figures.SLOTS)}
        parts |= {"0/names": [f"{stage}.bias", f"{stage}.weight"], "0/sizes": [2, 5]}
        numpy.savez(tmp_path / f"rank_{rank}.npz", stage=stage, data_rank=data_rank, **parts)
    told = {key: list(values) for key, values in figures.public_end(tmp_path).items()}
    assert len(told) == 2 * 2 * 3
    assert told["0.bias", "master"] == [0, 1] and told["0.weight", "master"] == [2, 3, 4, 5, 6]
    assert told["1.weight", "exp_avg"] == [103, 104, 105, 106, 107]


def test_tables_have_a_row_for_each_case_and_say_what_failed():
    told = {
        "iterations": {
            "ours": {
                "ours, no snapshots": {"iteration_s": 0.1, "overhead": 0.0},
                "ours, W=3": {"iteration_s": 0.11, "overhead": 0.1},
            }
        },
        "snapshot_bytes": {"ours, W=3": [3_000_000, 2_000_000, 1_000_000]},
        "faults": {
            "ours, W=3, worker 1 killed": {
                "first_new_s": 0.5, "again": 3, "parameters": 9, "identical": 9, "largest": 0.0
            },
            "public, W=3, worker 1 killed": {"failed": "exit code 2"},
        },
    }  # fmt: skip
    rows = figures.tables(told).splitlines()
    assert "| ours, no snapshots | 100 |  |  |  |" in rows
    assert "| ours, W=3 | 110 | +10% | 3.0 / 2.0 / 1.0 | 6.0 |" in rows
    assert "| ours, W=3, worker 1 killed | 0.50 | 3 | 9 of 9 | 0 |" in rows
    assert "| public, W=3, worker 1 killed | failed | | | |" in rows


def test_the_reason_of_a_failure_is_its_first_error_without_the_way_there():
    lines = [
        "a new iteration was not reached; last output of the job:",
        '  File "x.py"',
        "[rank3]: KeyError: 'a'",
        "TypeError: b",
    ]
    words = "\n".join(lines)
    assert figures.reason(words) == "a new iteration did not come: KeyError: 'a'"
    assert figures.reason("exit code 2\nnothing more") == "exit code 2"
