"""Snapshots beside training: they change nothing, and who goes on from one has never stopped, to the last bit."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from moc.session.saving.storage import BEYOND
from moc.store.host_memory import SPARE
from moc.store.store import checkpoint_name, shard_file_name
from tests.integration.snapshot_files import (
    EVERY,
    contents,
    events,
    newest_whole,
    node_memory,
    start,
    stores,
    told,
    train,
    whole,
)
from tests.integration.test_atomic_save import wait_for
from tests.integration.test_determinism import DROPOUT
from tests.integration.test_precision import BF16
from tests.integration.tiny import EXPERT_BIAS, known
from tests.shared import once

REPLICATED = dict(use_distributed_optimizer=False)
SCALING = dict(fp16=True, initial_loss_scale=2.0**34, hysteresis=1, loss_scale_window=2)  # falls, then rises again
OVERLAPPED = dict(overlap_grad_reduce=True, overlap_param_gather=True)
BLOCKING, MEMORY = dict(ckpt_blocking=True), dict(ckpt_tier="memory")
RUNS = {
    "fp32": ("1", {}),
    "fp32 replicated, in memory": ("DP2", REPLICATED | MEMORY),
    "bf16, expert bias, in memory": ("PP2xEP2", BF16 | EXPERT_BIAS | MEMORY),
    "fp16 replicated": ("PP2", SCALING | REPLICATED),
    "fp16 in memory, blocking": ("TP2xEP2", SCALING | MEMORY | BLOCKING),
    "bf16 interleaved": ("interleaved", BF16),
    "bf16 overlapped": ("DP2", BF16 | OVERLAPPED),
    "expert bias replicated": ("DP2", BF16 | EXPERT_BIAS | REPLICATED),
}


@pytest.fixture
def flags(data, tmp_path):
    """Of a run that takes a snapshot in each iteration."""
    with node_memory() as memory:
        places = dict(ckpt_dir=str(tmp_path / "snapshots"), ckpt_memory_dir=memory, log_dir=str(tmp_path / "log"))
        yield data | EVERY | places


def kill_after(world, iteration: int, flags: dict) -> None:
    """Kills a world once it has published a snapshot of this iteration or a later one."""
    # looked for each time, since memory has a name only when the run has begun
    saved = lambda: (i for store in stores(flags).values() for i in store.iterations())  # noqa: E731
    wait_for(lambda: world.ended() or any(i >= iteration for i in saved()))
    world.kill()
    assert {result.exit for result in world.wait()} == {-signal.SIGKILL}


@pytest.mark.recovery
@pytest.mark.parametrize("run", RUNS)
def test_snapshot_resume_is_bit_identical(run, data, flags):
    layout, changes = RUNS[run]
    changes = DROPOUT | changes | dict(train_iters=1000)
    kill_after(start(layout, flags | changes), 2, flags | changes)
    newest = newest_whole(flags | changes)
    changes |= dict(exit_interval=newest + 3)
    resumed = train(layout, flags | changes)
    plain = {name: value for name, value in changes.items() if not name.startswith("ckpt_")}
    straight = train(layout, data | plain)
    assert 2 <= resumed.start == newest
    assert resumed.records == straight.records[newest:]
    assert resumed.samples == {i: straight.samples[i] for i in range(newest, newest + 3)}
    assert resumed.weights == straight.weights
    (event,) = events(flags, "resume")
    assert event["tier"] == ("memory" if "ckpt_tier" in changes else "storage")


MOVES = [  # from a layout with flags, to another with flags
    ("PP2xEP2", REPLICATED, "TP2", {}),
    ("TP2xEP2", {}, "PP2", REPLICATED),
]


@pytest.mark.parametrize("move", MOVES, ids=lambda move: f"{move[0]} to {move[2]}")
def test_run_resumes_in_another_layout(move, data, flags):
    layout, changes, other, other_changes = move
    whole_run = known(layout, data | changes)
    train(layout, flags | changes | dict(exit_interval=3))
    rest = train(other, flags | other_changes)
    assert rest.start == 3
    assert rest.losses == pytest.approx(whole_run.losses[3:], abs=1e-6)
    assert rest.samples == {i: whole_run.samples[i] for i in (3, 4, 5)}


@pytest.fixture
def blocking(tmp_path):
    """What snapshots hold for which training has waited, by iteration."""

    def take() -> dict[str, dict]:
        flags = EVERY | BLOCKING | dict(ckpt_dir=str(tmp_path / "blocking"), ckpt_keep=10, exit_interval=4)
        train("plain DP2", flags)
        return {str(i): contents(stores(flags)["storage"], i) for i in (1, 2, 3, 4)}

    return once("blocking snapshots", take)


SLOW_NAMES = "snapshot_bodies:train_with_slow_names"
SLOW = {
    "copies": ("train_with_copies_that_wait", dict(copy_s=0.2), {}),
    "copies in memory": ("train_with_copies_that_wait", dict(copy_s=0.2), MEMORY),
    "writing": ("train_slowly", dict(write_s=0.4), {}),
    "writing from memory": ("train_slowly", dict(write_s=0.4), MEMORY | dict(persist_interval=1)),
}


@pytest.mark.parametrize("slow", SLOW)
def test_slow_snapshots_contain_state_of_one_iteration(slow, blocking, flags):
    body, delays, tier = SLOW[slow]
    flags = flags | tier | dict(ckpt_keep=10, exit_interval=4)
    train("plain DP2", flags, f"snapshot_bodies:{body}", **delays)
    iterations = whole(flags)["storage"]
    assert iterations[-1] == 4 and (tier or iterations == [1, 2, 3, 4])
    for iteration in iterations:
        assert contents(stores(flags)["storage"], iteration) == blocking[str(iteration)], iteration
    if "copy_s" in delays:  # training has waited for copies, except for the time of forward and backward passes
        assert events(flags, "stall")


LAGGING = {  # flags, and how many snapshots are at most unpublished: the buffers and two more, or fewer by a flag
    "disk": ({}, SPARE + BEYOND),
    "disk, lag of 1": (dict(max_snapshot_lag=1), 2),
    "memory": (MEMORY | dict(persist_interval=1), None),  # others are in memory alone
}


@pytest.mark.parametrize("case", LAGGING)
def test_slow_commit_delays_storage_by_few_snapshots(case, flags):
    """Syncs of directories are slow, which publication and removal wait for; the writes of files are not.

    Storage has the two snapshots that are kept, and those that are unpublished, one of which may have just been
    published, so that an older one is about to be removed.  Beside memory, one is written while one is published.
    """
    more, most = LAGGING[case]
    trained = train("plain DP2", flags | more | dict(ckpt_keep=2, train_iters=30), SLOW_NAMES, sync_s=0.05)
    unpublished, directories = zip(*trained.workers[0]["unpublished"], strict=True)
    assert len(unpublished) == 30 and max(directories) <= 2 + (most or 2)
    if most is not None:
        assert max(unpublished) <= most
        assert sum(event["seconds"] for event in events(flags, "stall")) > 20 * 0.05
    assert whole(flags)["storage"][-1] == 30


def test_blocking_save_makes_training_wait(flags):
    train("plain DP2", flags | BLOCKING, "snapshot_bodies:train_slowly", write_s=0.1)
    assert sum(event["seconds"] for event in events(flags, "stall")) > 6 * 0.1
    saved, iterations = (
        [event["time"] for event in events(flags, kind) if event["iteration"] < 6] for kind in ("persist", "iteration")
    )
    assert all(done <= told for done, told in zip(saved, iterations, strict=True))


def test_newest_snapshot_is_found_despite_wrong_clocks(data, flags):
    flags = flags | dict(ckpt_keep=3)
    train("plain", flags | dict(exit_interval=4), "snapshot_bodies:train_while_clocks_run_backwards")
    for iteration, day in ((2, 40), (3, 20), (4, 0)):  # the older the later, in days since 1970
        for path in Path(flags["ckpt_dir"], checkpoint_name(iteration)).iterdir():
            os.utime(path, (86400 * day, 86400 * day))
        os.utime(path.parent, (86400 * day, 86400 * day))
    rest, straight = train("plain", flags), known("plain", data)
    assert rest.start == 4
    assert rest.records == straight.records[4:]


def test_ckpt_step_goes_back_and_hides_newer_snapshots(data, flags, tmp_path):
    flags = flags | dict(ckpt_keep=9, snapshot_interval="2", train_iters=8)
    straight = train("1", flags)
    back = dict(load=str(tmp_path / "none"), ckpt_step=2, lr=1e-3, override_opt_param_scheduler=True)
    other = train("1", flags | back | dict(exit_interval=5))
    assert other.start == 2 and other.records != straight.records[2:5]
    assert whole(flags)["storage"] == [2, 4, 5]  # 4 is the one of the second run
    assert train("1", flags | back | dict(train_iters=5)).start == 5  # the same command does not go back again
    assert Path(flags["ckpt_dir"], checkpoint_name(8), shard_file_name(0)).exists()
    again = train("1", flags | dict(back, ckpt_step=None))
    assert again.start == 5
    assert whole(flags)["storage"] == [2, 4, 5, 6, 8]


@pytest.mark.parametrize("tier", ["disk", "memory"])
def test_missing_ckpt_step_is_refused(tier, flags):
    flags = flags | dict(ckpt_tier=tier)
    train("plain", flags | dict(exit_interval=2))
    for result in start("plain", flags | dict(ckpt_step=7)).wait():
        assert result.exit == 1 and "iter_0000007" in result.output, result.output
        assert "Traceback" not in result.output, result.output
    assert whole(flags)["storage"][-1] == 2


def test_newer_of_snapshot_and_dense_checkpoint_is_loaded(data, flags, tmp_path):
    dense = dict(save=str(tmp_path / "dense"), load=str(tmp_path / "dense"))
    straight = known("EP2", data)
    train("EP2", data | dense | dict(exit_interval=2))
    first = train("EP2", flags | dense | dict(exit_interval=3, save=None))
    assert first.start == 2
    second = train("EP2", flags | dense | dict(exit_interval=4))
    assert second.start == 3 and "tier" in events(flags, "resume")[-1]
    shutil.rmtree(Path(flags["ckpt_dir"], checkpoint_name(4)))
    third = train("EP2", flags | dense)
    assert third.start == 4 and len(events(flags, "resume")) == 1
    assert first.records + second.records + third.records == straight.records[2:]
    assert third.weights == straight.weights


def test_finetuning_resumes_from_its_snapshots(data, flags, tmp_path):
    train("1", data | dict(save=str(tmp_path / "dense"), train_iters=5))
    tuning = flags | dict(load=str(tmp_path / "dense"), finetune=True)
    first = train("1", tuning | dict(exit_interval=2))
    second = train("1", tuning)
    assert (first.start, second.start) == (0, 2)
    plain = {name: value for name, value in tuning.items() if not name.startswith(("ckpt", "snapshot"))}
    assert first.records + second.records == train("1", plain).records


def test_auto_interval_is_chosen_after_measuring(data, flags):
    long = dict(train_iters=120)
    automatic = train("plain DP2", flags | long | dict(snapshot_interval="auto", ckpt_overhead_budget=0.5))
    taken = [event["iteration"] for event in events(flags, "snapshot")]
    assert len(taken) > 3 and taken[0] > 30  # it measures undisturbed iterations first
    assert automatic.records == train("plain DP2", data | long).records


@pytest.mark.parametrize("tier", ["disk", "memory"])
def test_signal_saves_latest_state_to_storage(tier, flags):
    flags = flags | dict(ckpt_tier=tier, snapshot_interval="1000", train_iters=5000, exit_signal_handler=True)
    world = start("EP2", flags)
    wait_for(lambda: events(flags, "iteration"))
    os.kill(world.pids[1], signal.SIGTERM)
    run = told(world)
    assert run.codes == [75, 75]
    assert whole(flags) == {"storage": [len(run.records)]} | ({"memory": []} if tier == "memory" else {})
    assert not list(Path(flags["ckpt_memory_dir"]).glob("*/*/[!.]*"))


def test_memory_snapshots_reach_storage_at_persist_interval(flags):
    flags = flags | MEMORY | dict(persist_interval=2, ckpt_keep=9, train_iters=7)
    train("plain DP2", flags, "snapshot_bodies:train_beside_fast_storage")
    assert whole(flags)["storage"] == [2, 4, 6, 7]


@pytest.mark.recovery
def test_finished_run_moves_last_snapshot_to_storage(data, flags):
    """Its last snapshot is in memory alone, since it was killed on the way to storage."""
    flags = flags | MEMORY
    world = start("plain DP2", flags, "snapshot_bodies:train_slowly", write_s=600)
    kill_after(world, 6, flags)
    assert 6 not in stores(flags)["storage"].iterations()
    ended = train("plain DP2", flags)
    assert ended.start == 6
    assert whole(flags) == {"storage": [6], "memory": []}
    after = train("plain DP2", flags)
    assert after.weights == known("plain DP2", data).weights
