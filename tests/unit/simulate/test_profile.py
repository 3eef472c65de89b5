"""Times and bandwidths from a run's events."""

import json

import pytest

from moc.simulate.profile import read_profile


def write(path, *events):
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def iteration(number, seconds):
    return {"type": "iteration", "iteration": number, "elapsed_s": seconds}


def test_quiet_iterations_and_bandwidths(tmp_path):
    saved = [{"type": "snapshot", "iteration": n, "bytes": 4000, "copy_s": 0.5} for n in range(8, 20, 2)]
    written = {"type": "persist", "iteration": 12, "bytes": 4000, "write_s": 2.0}
    quiet = [iteration(n, 9.0 if n <= 5 else 1.0 if n < 8 else 5.0) for n in range(1, 20)]
    path = write(tmp_path / "events.jsonl", {"type": "start", "world_size": 4}, *quiet, *saved, written)
    found = read_profile(tmp_path)
    assert found == read_profile(path)
    assert (found.iteration_s, found.world) == (1.0, 4)
    assert (found.host_bandwidth, found.storage_bandwidth, found.snapshot_bytes) == (2000, 2000, 4000)


def test_what_is_no_profile_is_refused(tmp_path):
    path = write(tmp_path / "short.jsonl", iteration(1, 1.0))
    with pytest.raises(ValueError, match="no iterations after the first 5"):
        read_profile(path)
    path.write_text("loss: 3\n")
    with pytest.raises(ValueError, match="line 1 of .* is no JSON"):
        read_profile(path)
