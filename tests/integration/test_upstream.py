"""Upstream logs: a stage computes an iteration again by itself, to the last bit; and what logs cost a run."""

import pytest

from tests.integration.snapshot_files import events
from tests.integration.test_determinism import DROPOUT
from tests.integration.test_precision import BF16
from tests.integration.tiny import FLAGS, FOUR, LAYOUTS, train
from tests.worlds import run_world

LOGGING = dict(ckpt_policy="sparse", sparse_window=3, upstream_logging=True)
RUNS = {
    "1F1B, fp32": ("PP2", {}),
    "1F1B, bf16, by tokens": ("PP2", BF16 | dict(calculate_per_token_loss=True)),
    "interleaved, fp32": ("interleaved", {}),
    "interleaved, bf16": ("interleaved", BF16),
}


@pytest.fixture
def flags(data, tmp_path):
    """Of a run with upstream logs."""
    places = dict(ckpt_dir=str(tmp_path / "c"), ckpt_memory_dir=str(tmp_path), log_dir=str(tmp_path / "log"))
    return data | FOUR | LOGGING | places


@pytest.mark.parametrize("run", RUNS)
def test_stage_replays_iteration_without_other_stages(run, flags):
    layout, changes = RUNS[run]
    size, parallel = LAYOUTS[layout]
    body = "tests.integration.upstream_bodies:replay_alone"
    workers = run_world(size, body, flags=FLAGS | parallel | flags | DROPOUT | changes, iterations=2)
    for worker in workers:
        assert worker["alone"] == worker["together"] and worker["same"]
        chunks = 2 if layout == "interleaved" else 1
        asked = [name for name, _ in worker["messages"] if name in ("isend", "irecv", "batch_isend_irecv")]
        assert asked == ["irecv"] * chunks  # one message for what was sent to it in one direction
        assert {workers for name, workers in worker["messages"] if name != "irecv"} <= {1}  # it has no other peers
        tensor = 16 * 1 * 32 * (2 if "bf16" in run else 4)
        assert worker["bytes"] == 4096 + 4 * (2 * chunks - 1) * tensor
    assert workers[-1]["alone"]["loss_tokens"] == 4 * 16


def test_upstream_logs_are_released_and_training_is_identical(data, flags, tmp_path):
    long = dict(train_iters=14)
    assert train("PP2", flags | long).records == train("PP2", data | FOUR | long).records
    told = events(flags, "iteration")
    most = max(event["upstream_log_iterations"] for event in told)
    assert 0 < most <= 2 * 3 + 3  # two windows, and what storage lags behind
    assert told[-1]["upstream_log_bytes"] <= 2 * (most + 1) * (4096 + 4 * 16 * 32 * 4)
    assert not list(tmp_path.rglob("logs"))
