"""Sparse checkpoints: who goes on from a window has never stopped, to the last bit."""

import signal

import pytest

from tests.integration.snapshot_files import events, start, train
from tests.integration.test_determinism import DROPOUT
from tests.integration.test_precision import BF16
from tests.integration.tiny import EXPERT_BIAS

HARD = DROPOUT | dict(clip_grad=0.3, lr=1e-2, weight_decay=0.1, train_iters=9)
SPARSE = dict(ckpt_policy="sparse", sparse_window="3", ckpt_blocking=True)
REPLICATED, TIED = dict(use_distributed_optimizer=False), dict(untie_embeddings_and_output_weights=False)
SCALING = dict(fp16=True, initial_loss_scale=2.0**18, hysteresis=1, loss_scale_window=2)  # rises, and overflows
RUNS = {
    "bf16, expert bias": ("PP2xEP2", BF16 | EXPERT_BIAS | dict(sparse_order="soft")),
    "fp16, tied, replicated": ("PP2", SCALING | TIED | REPLICATED | dict(sparse_order="decayed")),
    "fp32, recomputed": ("EP2", dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)),
}


@pytest.fixture
def flags(data, tmp_path):
    """Of a run with sparse checkpoints."""
    return data | SPARSE | dict(ckpt_dir=str(tmp_path / "c"), log_dir=str(tmp_path / "log"))


@pytest.mark.recovery
@pytest.mark.parametrize("run", RUNS)
def test_recovery_is_bit_identical(run, data, flags):
    layout, changes = RUNS[run]
    straight = train(layout, data | HARD | changes, "sparse_bodies:train")
    assert min(straight.norms) > HARD["clip_grad"]
    killed = start(layout, flags | HARD | changes, "sparse_bodies:die_after", iteration=8).wait()
    assert {result.exit for result in killed} == {-signal.SIGKILL}, killed[0].output[-2000:]
    resumed = train(layout, flags | HARD | changes, "sparse_bodies:train")
    assert resumed.start == 6
    assert [(e["iteration"], e["exact"]) for e in events(flags, "replay")] == [(5, True), (6, True)]
    assert resumed.records == straight.records[6:]
    assert [w["state"] for w in resumed.workers] == [w["state"] for w in straight.workers]
