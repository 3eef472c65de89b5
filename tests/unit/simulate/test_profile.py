"""Times and bandwidths from a run's events."""

import json

import pytest

from moc.simulate.policy_costs import RecoveryCosts
from moc.simulate.profile import read_profile
from tests.errors import raises


def write(path, *events):
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def iteration(number, seconds):
    return {"type": "iteration", "iteration": number, "elapsed_s": seconds}


def test_profile_measures_quiet_iterations_and_bandwidths(tmp_path):
    saved = [{"type": "snapshot", "iteration": n, "bytes": 4000, "copy_s": 0.5} for n in range(8, 20, 2)]
    written = {"type": "persist", "iteration": 12, "bytes": 4000, "write_s": 2.0}
    quiet = [iteration(n, 9.0 if n <= 5 else 1.0 if n < 8 else 5.0) for n in range(1, 20)]
    path = write(tmp_path / "events.jsonl", {"type": "start", "world_size": 4}, *quiet, *saved, written)
    found = read_profile(tmp_path)
    assert found == read_profile(path)
    assert (found.iteration_s, found.world) == (1.0, 4)
    assert (found.host_bandwidth, found.storage_bandwidth, found.snapshot_bytes) == (2000, 2000, 4000)


def test_profile_measures_snapshot_and_recovery_times(tmp_path):
    def at(kind, time, **fields):
        return {"type": kind, "time": time, **fields}

    saved = [at("snapshot", n, tier="disk", iteration=n, bytes=400, copy_s=0.25, hash_s=0.125) for n in range(1, 20)]
    written = [at("persist", n, iteration=n, bytes=400, write_s=0.5) for n in range(1, 20)]
    calm = [iteration(n, 2.0 if n % 2 else 1.0) | {"time": n} for n in range(1, 20)]
    lost = [at("inject", 20.0, action="kill"), at("resume", 22.0, seconds=0.5), at("start", 22.0)]
    recovered = [*lost, iteration(20, 9.0) | {"time": 25.5}]
    path = write(tmp_path / "events.jsonl", *saved, *written, *calm, *recovered)
    with open(path, "a") as file:
        file.write('{"type": "iterat\n')  # torn by a kill
    found = read_profile(path)
    assert found.mean_iteration_s == pytest.approx(1.5)  # of 6 to 19; what follows a recovery is no usual iteration
    assert found.usable_s == 0.875
    assert found.recoveries == ((1, RecoveryCosts(0.0, 1.5, 0.5, 3.5 - 1.5)),)


def test_stalls_are_excluded_if_every_iteration_saves(tmp_path):
    run = []
    for n in range(1, 13):
        stall = {"type": "stall", "iteration": n - 1, "seconds": 0.25}
        run += [stall, {"type": "snapshot", "iteration": n, "bytes": 4000, "copy_s": 0.5}, iteration(n, 1.25)]
    write(tmp_path / "events.jsonl", *run)
    assert read_profile(tmp_path).iteration_s == 1.0


def test_invalid_profile_is_refused(tmp_path):
    path = write(tmp_path / "short.jsonl", iteration(1, 1.0))
    with raises("run-too-short", "short.jsonl", "5"):
        read_profile(path)
    path.write_text("loss: 3\n")
    with raises("events-invalid", str(path)):
        read_profile(path)
