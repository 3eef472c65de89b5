"""Sparse checkpoints: who goes on from a window has never stopped, to the last bit."""

import signal
from pathlib import Path

import pytest

from moc.errors import codes_in
from moc.policy.interval import BLOCK, WARM_UP
from moc.store.store import checkpoint_name, shard_file_name
from tests.integration.launched import Launched
from tests.integration.snapshot_files import events, node_memory, start, stores, train, whole
from tests.integration.test_determinism import DROPOUT
from tests.integration.test_precision import BF16
from tests.integration.tiny import DEEP, EXPERT_BIAS, known

HARD = DROPOUT | dict(clip_grad=0.3, lr=1e-2, weight_decay=0.1, train_iters=9)
SPARSE = dict(ckpt_policy="sparse", ckpt_blocking=True)
REPLICATED, TIED = dict(use_distributed_optimizer=False), dict(untie_embeddings_and_output_weights=False)
SCALING = dict(fp16=True, initial_loss_scale=2.0**18, hysteresis=1, loss_scale_window=2)  # rises, and overflows
SMALL = dict(train_iters=14)
RUNS = {  # layout, flags, window, killed after
    "bf16, expert bias": ("PP2xEP2", BF16 | EXPERT_BIAS | dict(sparse_order="soft"), 3, 8),
    "fp16, tied, replicated": ("PP2", SCALING | TIED | REPLICATED | DEEP | dict(sparse_order="decayed"), 5, 7),
    "fp32, each snapshot of everything": ("PP2", {}, 1, 4),
    "fp32, recomputed": (
        "EP2",
        dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
        3,
        8,
    ),
}


@pytest.fixture
def flags(data, tmp_path):
    """Of a run with sparse checkpoints."""
    return data | SPARSE | dict(ckpt_dir=str(tmp_path / "c"), log_dir=str(tmp_path / "log"))


@pytest.mark.recovery
@pytest.mark.parametrize("run", RUNS)
def test_sparse_recovery_is_bit_identical(run, data, flags):
    layout, changes, window, killed_after = RUNS[run]
    plain = {name: value for name, value in changes.items() if not name.startswith("sparse_")}
    straight = train(layout, data | HARD | plain, "sparse_bodies:train")
    assert min(straight.norms) > HARD["clip_grad"]
    flags = flags | HARD | changes | dict(sparse_window=window)
    killed = start(layout, flags, "sparse_bodies:die_after", iteration=killed_after).wait()
    assert {result.exit for result in killed} == {-signal.SIGKILL}, killed[0].output[-2000:]
    end, store = (killed_after - 1) // window * window + 1, stores(flags)["storage"]  # the first one has everything
    if "fp16" in changes:
        assert any(record["skipped"] for record in straight.records[2:end])
    saved = [store.read_manifest(iteration).operators for iteration in range(end - window + 1, end + 1)]
    whole = [{name for name, entry in operators.items() if entry.detail == "full"} for operators in saved]
    resumed = train(layout, flags, "sparse_bodies:train")
    assert resumed.start == end
    for worker in resumed.workers:
        *again, here = map(set, worker["learned"])
        assert again == [here & set().union(*whole[: i + 1]) for i in range(window - 1)]
    repeated = range(end - window + 2, end + 1)
    assert [(event["iteration"], event["exact"]) for event in events(flags, "replay")] == [(i, True) for i in repeated]
    assert resumed.records == straight.records[end:] and resumed.weights == straight.weights
    assert [worker["state"] for worker in resumed.workers] == [worker["state"] for worker in straight.workers]


@pytest.mark.recovery
def test_damaged_stored_window_is_skipped(data, flags):
    flags = flags | SMALL
    straight = known("1", data | SMALL)
    start("1", flags | dict(sparse_window=3, ckpt_keep=2), "sparse_bodies:die_after", iteration=11).wait()
    store = stores(flags)["storage"]
    assert store.iterations() == [5, 6, 7, 8, 9, 10, 11]
    path = Path(flags["ckpt_dir"], checkpoint_name(9), shard_file_name(0))
    path.write_bytes(path.read_bytes()[:-1])
    resumed = train("1", flags | dict(ckpt_policy="full", snapshot_interval=1, ckpt_keep=1))  # any exact policy can
    assert resumed.start == 7 and resumed.records == straight.records[7:]
    assert resumed.weights == straight.weights
    assert store.iterations() == [14]


def test_run_that_cannot_freeze_operators_is_refused_at_start(flags):
    for result in start("DP2", flags | dict(overlap_grad_reduce=True)).wait():
        assert result.exit == 1 and "turn off --overlap-grad-reduce" in result.output, result.output


@pytest.fixture
def in_memory(flags):
    """The same, of a run that keeps its windows in memory."""
    with node_memory() as memory:
        yield flags | SMALL | dict(ckpt_tier="memory", ckpt_memory_dir=memory)


@pytest.mark.recovery
def test_memory_window_survives_its_workers(data, in_memory):
    flags = in_memory | dict(sparse_window=3, persist_interval=4)
    straight = known("PP2xEP2", data | SMALL)
    start("PP2xEP2", flags, "sparse_bodies:die_after", iteration=9).wait()
    there = whole(flags)
    assert there["memory"] == [5, 6, 7, 8, 9] and set(there["storage"]) <= {5, 6, 7, 8, 9}
    resumed = train("PP2xEP2", flags)
    (event,) = events(flags, "resume")
    assert event["sources"] == [[7, "memory"], [6, "memory"], [5, "memory"]] and resumed.start == 7
    assert [event["exact"] for event in events(flags, "replay")] == [True] * 2
    assert resumed.records == straight.records[7:] and resumed.weights == straight.weights
    there = whole(flags)
    assert there["memory"] == [] and there["storage"][-1] == 14


@pytest.mark.recovery
def test_finished_run_moves_window_from_memory_to_storage(in_memory):
    flags = in_memory | dict(sparse_window=3, train_iters=7)
    start("1", flags, "sparse_bodies:die_after", iteration=7).wait()
    assert whole(flags) == {"storage": [], "memory": [5, 6, 7]}
    assert train("1", flags).start == 7
    assert whole(flags) == {"storage": [7], "memory": []}
    assert train("1", flags).start == 7


def test_memory_too_small_for_window_is_reported_by_all_workers(in_memory):
    flags = in_memory | dict(sparse_window=3)
    for result in start("EP2", flags, "sparse_bodies:train_with_little_memory", buffers=5).wait():
        assert result.exit == 1 and "memory-full" in codes_in(result.output), result.output[-2000:]
        assert "--ckpt-tier disk" in result.output
    assert whole(flags)["memory"] == []


@pytest.mark.recovery
@pytest.mark.timeout(300)
def test_survivors_resume_from_memory_window(data, in_memory, tmp_path):
    flags = in_memory | dict(sparse_window=3, train_iters=20, ckpt_blocking=False)
    straight = known("EP2", data | SMALL | dict(train_iters=20))
    with Launched("EP2", flags, tmp_path / "job") as job:
        for iteration, rank in ((9, 1), (15, 0)):
            job.reach(iteration)
            job.kill(rank)
            job.reach(iteration + 2)
        assert job.wait() == 0, job.console[-4000:]
    assert job.records() == [(r["iteration"], r["loss"], r["grad_norm"]) for r in straight.records]
    assert [event["exact"] for event in job.events("replay")] == [True] * 4
    assert {event["tier"] for event in job.events("resume")} == {"memory"}


@pytest.mark.recovery
@pytest.mark.timeout(300)
def test_window_continues_if_lost_state_has_copies(data, in_memory, tmp_path):
    midway = dict(inject="kill rank=1 iteration=7 point=snapshot_copying")  # of a window that goes from 6 to 9
    flags = in_memory | REPLICATED | midway | dict(sparse_window=4)
    straight = known("DP2", data | SMALL | REPLICATED)
    with Launched("DP2", flags, tmp_path / "job") as job:
        job.reach(11)
        job.kill(0, 1)
        assert job.wait() == 0, job.console[-4000:]
    assert job.records() == [(r["iteration"], r["loss"], r["grad_norm"]) for r in straight.records]
    first, second = job.events("resume")
    assert (first["tier"], second["tier"]) == ("live", "memory")
    assert second["iteration"] % 4 == 1 and second["iteration"] > first["iteration"]  # so none was lost


def test_window_length_auto_adapts_to_copy_speed(data, flags):
    flags = flags | SMALL | dict(train_iters=20, ckpt_blocking=False)
    slow = train("EP2", flags, "pec_bodies:train_with_slow_copies", bytes_per_s=7e5)
    assert slow.records == known("EP2", data | SMALL | dict(train_iters=20)).records
    taken = {event["iteration"]: event["bytes"] for event in events(flags, "snapshot")}
    assert min(taken) == WARM_UP + BLOCK + 1  # of everything, which shows how slow copies are
    chosen = [event for event in events(flags, "choice") if event["sparse_window"] > 1]
    assert chosen and "GB/s" in chosen[0]["reason"]
    assert taken[max(taken) - 1] < 0.7 * taken[min(taken)]  # the last one of a run is of everything
