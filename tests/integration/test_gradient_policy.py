"""Gradient checkpoints: whoever goes on from bases and gradients has the bits of a run without a fault."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from moc.errors import codes_in
from moc.store.storage import LocalStorage
from moc.store.store import Store
from tests.integration.launched import Launched
from tests.integration.snapshot_files import contents, events, node_memory, start, stores, train
from tests.integration.test_determinism import DROPOUT
from tests.integration.test_peers import lose, memory_of
from tests.integration.test_precision import BF16
from tests.integration.tiny import DEEP, EXPERT_BIAS, known
from tests.shared import ALL

HARD = DROPOUT | dict(clip_grad=0.3, lr=1e-2, weight_decay=0.1, train_iters=12)
GRADIENT = dict(ckpt_policy="gradient", gradient_window=3, ckpt_blocking=True)
REPLICATED, TIED = dict(use_distributed_optimizer=False), dict(untie_embeddings_and_output_weights=False)
SCALING = dict(fp16=True, initial_loss_scale=2.0**18, hysteresis=1, loss_scale_window=2)  # rises, and overflows
RUNS = {  # layout, flags, killed after
    "bf16, expert bias": ("PP2xEP2", BF16 | EXPERT_BIAS, 9),
    "fp16, tied, replicated": ("PP2", SCALING | TIED | REPLICATED | DEEP, 7),
    "fp32, TP": ("TP2xEP2", {}, 8),
}
MORE = {
    "fp32, DP4": ("DP4xEP2", {}, 8),
    "fp32, interleaved": ("interleaved", {}, 10),
    "bf16, replicated": ("DP2", BF16 | REPLICATED, 6),
}
RUNS |= MORE if ALL else {}


@pytest.fixture
def flags(data, tmp_path):
    """Of a run with gradient checkpoints in memory."""
    with node_memory() as memory:
        places = dict(ckpt_dir=str(tmp_path / "c"), ckpt_memory_dir=memory, log_dir=str(tmp_path / "log"))
        yield data | GRADIENT | places | dict(ckpt_tier="memory")


@pytest.mark.recovery
@pytest.mark.parametrize("run", RUNS)
def test_restart_is_bit_identical_without_replay(run, data, flags):
    layout, changes, killed_after = RUNS[run]
    straight = train(layout, data | HARD | changes, "sparse_bodies:train")
    assert min(straight.norms) > HARD["clip_grad"]
    flags = flags | HARD | changes
    killed = start(layout, flags, "sparse_bodies:die_after", iteration=killed_after).wait()
    assert {result.exit for result in killed} == {-signal.SIGKILL}, killed[0].output[-2000:]
    details = [set(_details(stores(flags)["memory"], iteration)) for iteration in _kept(flags)]
    assert all(found == {"full", "grad"} for found in details)
    resumed = train(layout, flags, "sparse_bodies:train")
    assert resumed.start == killed_after
    assert not [event for event in events(flags, "replay")]
    if "fp16" in changes:
        assert any(record["skipped"] for record in straight.records)
    assert resumed.records == straight.records[killed_after:] and resumed.weights == straight.weights
    assert [worker["state"] for worker in resumed.workers] == [worker["state"] for worker in straight.workers]


def _kept(flags: dict) -> list[int]:
    """The snapshots in memory: as many as a window has."""
    iterations = stores(flags)["memory"].iterations()
    assert len(iterations) == GRADIENT["gradient_window"], iterations
    return iterations


def _details(store: Store, iteration: int) -> list[str]:
    return [entry.detail for entry in store.read_manifest(iteration).operators.values()]


def test_other_schedule_is_refused_and_not_taken_for_damage(flags):
    start("1", flags | HARD, "sparse_bodies:die_after", iteration=5).wait()
    (refused,) = start("1", flags | HARD | dict(lr=2e-2), "sparse_bodies:train").wait()
    assert refused.exit == 1 and "--use-checkpoint-opt-param-scheduler" in refused.output
    assert "an older" not in refused.output
    kept = train("1", flags | HARD | dict(lr=2e-2, use_checkpoint_opt_param_scheduler=True), "sparse_bodies:train")
    assert kept.start == 5


@pytest.mark.recovery
@pytest.mark.parametrize("layout", ["EP2", *ALL * ["PP2xEP2", "TP2xEP2", "DP4xEP2"]])
def test_only_lost_worker_reads_and_applies_gradients(layout, data, flags, tmp_path):
    """Killed before the vote: the others keep their state, and nobody computes an iteration again."""
    size = dict(train_iters=14, num_experts=8)
    faults = [f"kill rank=1 iteration={iteration} point=before_commit" for iteration in (7, 11)]
    with Launched(layout, flags | HARD | size | dict(inject=faults), tmp_path / "job") as job:
        assert job.wait() == 0, job.console[-4000:]
    straight = train(layout, data | HARD | size | _stored(tmp_path, 14))
    assert job.records() == [(r["iteration"], r["loss"], r["grad_norm"]) for r in straight.records]
    ends = [Store(LocalStorage(tmp_path / name)) for name in ("c", "straight")]
    assert contents(ends[0], 14) == contents(ends[1], 14)
    assert [event["iteration"] for event in job.events("resume")] == [6, 10]
    assert {event["kept"] for event in job.events("resume")} == {len(straight.workers) - 1}
    assert not job.events("replay")


def _stored(tmp_path, iteration: int) -> dict:
    return dict(ckpt_policy="full", snapshot_interval=iteration, ckpt_dir=str(tmp_path / "straight"))


@pytest.mark.recovery
def test_lost_node_is_restored_from_peers(data, flags, tmp_path):
    size = dict(train_iters=16, num_experts=8)
    peers = dict(ckpt_tier="peers", max_snapshot_lag=1)
    with Launched("PP2xEP2", flags | HARD | size | peers, tmp_path / "job", nodes=2, spares=1) as job:
        job.reach(9)
        lose(job, 1, memory_of(flags, "1"))
        assert job.wait() == 0, job.console[-4000:]
    train("PP2xEP2", data | HARD | size | _stored(tmp_path, 16))
    ends = [Store(LocalStorage(tmp_path / name)) for name in ("c", "straight")]
    assert contents(ends[0], 16) == contents(ends[1], 16)
    (resumed,) = job.events("resume")
    assert {tier for _, tier in resumed["sources"]} == {"memory"} and len(resumed["sources"]) > 1


@pytest.mark.recovery
def test_stored_round_resumes_in_other_layout_and_policy(data, flags, tmp_path):
    straight = known("1", data | dict(train_iters=14))
    stored = flags | dict(train_iters=14, persist_interval=3, ckpt_keep=2)
    start("1", stored, "sparse_bodies:die_after", iteration=9).wait()
    store = stores(flags)["storage"]
    assert store.iterations()[:3] == [5, 6, 7]  # a round, and the next one has begun
    assert "grad" not in _details(store, 5) and "grad" in _details(store, 7)
    full = stored | dict(ckpt_policy="full", snapshot_interval=1, gradient_window="auto")
    with node_memory() as elsewhere:  # the memory is lost
        there = train("DP2", full | dict(ckpt_memory_dir=elsewhere, skip_train=True))
    assert there.start == 7 and there.weights == train("1", data | dict(train_iters=14, exit_interval=7)).weights
    with node_memory() as elsewhere:
        resumed = train("1", full | dict(ckpt_memory_dir=elsewhere))
    assert resumed.start == 7 and resumed.records == straight.records[7:]
    assert resumed.weights == straight.weights


@pytest.mark.recovery
def test_memory_loss_before_stored_round_starts_over(data, flags, tmp_path):
    """Nobody has been told that anything is safe in storage: it has one of three snapshots of a round."""
    size, own = dict(train_iters=12, persist_interval=3), ["--silence-timeout", "5"]
    fault = "stop rank=1 iteration=7 point=before_commit"
    with Launched("EP2", flags | HARD | size | dict(inject=[fault]), tmp_path / "job", *own, nodes=2) as job:
        job.tells("injected: stop of worker 1 in iteration 7")
        assert stores(flags)["storage"].iterations() in ([5], [5, 6])
        job.lose(1)
        (gone,) = Path(flags["ckpt_memory_dir"]).rglob("*-node-1")
        shutil.rmtree(gone)  # as the memory of its machine would be
        job.start(1)
        assert job.wait() == 0, job.console[-4000:]
    assert "nothing-stored-yet" in codes_in(job.console)
    straight = train("EP2", data | HARD | size | _stored(tmp_path, 12) | dict(persist_interval=None))
    assert job.records()[-12:] == [(r["iteration"], r["loss"], r["grad_norm"]) for r in straight.records]
    ends = [Store(LocalStorage(tmp_path / name)) for name in ("c", "straight")]
    assert contents(ends[0], 12) == contents(ends[1], 12)


@pytest.mark.recovery
def test_finished_run_leaves_complete_state_in_storage(data, flags, tmp_path):
    start("EP2", flags | HARD, "sparse_bodies:die_after", iteration=12).wait()
    assert "grad" in _details(stores(flags)["memory"], 12)
    assert train("EP2", flags | HARD).start == 12
    train("EP2", data | HARD | _stored(tmp_path, 12))
    ends = [Store(LocalStorage(tmp_path / name)) for name in ("c", "straight")]
    assert contents(ends[0], 12) == contents(ends[1], 12)
