"""Storage that hangs, fails, or is gone for a while: training goes on, what is safe elsewhere stays so, all is told."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from moc.store import dense_files
from tests.integration.launched import Launched
from tests.integration.snapshot_files import EVERY, events, newest_whole, node_memory, start, told, train
from tests.integration.test_atomic_save import assert_whole, wait_for
from tests.integration.tiny import SHALLOW

LONG = dict(train_iters=100_000, exit_signal_handler=True)


@pytest.fixture(scope="module")
def data(data):
    """Of the dataset, for a model of two layers."""
    return data | SHALLOW


@pytest.fixture
def flags(data, tmp_path):
    """Of a run that takes a snapshot in each iteration."""
    with node_memory() as memory:
        places = dict(ckpt_dir=str(tmp_path / "snapshots"), ckpt_memory_dir=memory, log_dir=str(tmp_path / "log"))
        yield data | EVERY | places


UNCHECKED = "bodies:train_unchecked"
"""For directories that cannot be written from the first iteration on: at the start they could be."""


@contextlib.contextmanager
def gone(directory: str) -> Iterator[None]:
    """Somebody has taken a directory away, and a file is in its place."""
    path, aside = Path(directory), Path(f"{directory}.aside")
    path.rename(aside)
    path.write_text("in its place")
    yield
    path.unlink()
    aside.rename(path)


def stopped(world):
    """A world that was asked to stop, and did so in good order."""
    os.kill(world.pids[0], signal.SIGTERM)
    run = told(world)
    assert set(run.codes) == {75}
    return run


@pytest.mark.recovery
def test_hanging_write_delays_neither_training_nor_recovery(flags, data, tmp_path):
    hangs = "slow rank=1 iteration=3 point=persisting seconds=3600"
    more = dict(ckpt_tier="memory", persist_interval=2, inject=[hangs], train_iters=5000)
    with Launched("EP2", {k: v for k, v in flags.items() if k != "log_dir"} | more, tmp_path / "job") as job:
        job.tells("injected: slow of worker 1")
        at = job.iteration
        job.reach(at + 8)
        assert job.events("save_skipped")
        job.kill(0)
        at = job.iteration
        job.reach(at + 8)
        assert [event["tier"] for event in job.events("resume")] == ["memory"]
        records = job.records()
        stored = max((event["iteration"] for event in job.events("persist")), default=0)
        assert stored < min(event["iteration"] for event in job.events("save_skipped"))
    straight = train("EP2", data | dict(train_iters=5000, exit_interval=len(records)))
    assert records == [(r["iteration"], r["loss"], r["grad_norm"]) for r in straight.records]


@pytest.mark.parametrize("tier", [dict(ckpt_tier="disk"), dict(ckpt_tier="memory", persist_interval=2)], ids=str)
def test_unavailable_storage_is_reported_and_used_again(tier, flags):
    flags = flags | tier | LONG
    world = start("EP2", flags)
    wait_for(lambda: len(events(flags, "persist")) > 1 or world.ended())
    with gone(flags["ckpt_dir"]):
        wait_for(lambda: len(events(flags, "save_failed")) > 1 or world.ended())
        failed = events(flags, "save_failed")[1]
        wait_for(lambda: events(flags, "iteration")[-1]["iteration"] > failed["iteration"] + 2 or world.ended())
    assert not world.ended()
    wait_for(lambda: events(flags, "persist")[-1]["iteration"] > failed["iteration"] or world.ended())
    run = stopped(world)
    assert newest_whole(flags) == len(run.records)
    assert flags["ckpt_dir"] in failed["reason"] and failed["what"] == "snapshot" and failed["newest"] > 0


def test_failed_checkpoint_saves_are_reported_and_retried(data, tmp_path):
    root, log = tmp_path / "saved", str(tmp_path / "log")
    flags = data | LONG | dict(save=str(root), save_interval=3, log_dir=log)
    root.write_text("in its place")
    world = start("1", flags, UNCHECKED)
    wait_for(lambda: len(events(flags, "save_failed")) > 1 or world.ended())
    assert not world.ended()
    root.unlink()
    wait_for(lambda: dense_files.list_iterations(root) or world.ended())
    run = stopped(world)
    assert assert_whole(root) == len(run.records)
    first, second, *_ = events(flags, "save_failed")
    assert (first["what"], first["iteration"], first["newest"]) == ("checkpoint", 3, None)
    assert second["failures"] == 2 and str(root) in second["reason"]


@pytest.mark.parametrize("failure", ["continue", "stop"])
def test_failed_saves_stop_run_or_are_reported_at_end(failure, data, tmp_path):
    """Whoever wants it stops at the first save that fails; whoever does not trains to the end, and hears of it then."""
    root, log = tmp_path / "saved", str(tmp_path / "log")
    root.write_text("in its place")
    flags = data | dict(save=str(root), save_interval=2, log_dir=log, save_failure=failure, train_iters=5)
    (result,) = start("1", flags, UNCHECKED).wait()
    (said,) = (line for line in result.output.splitlines() if "pretrain_gpt_moe.py: error" in line)
    assert result.exit == 1 and str(root) in said and "Traceback" not in result.output, result.output
    assert len(events(flags, "iteration")) == (2 if failure == "stop" else 5)
    assert bool(events(flags, "save_failed")) == (failure == "continue")


def test_unwritable_logs_do_not_disturb_training(data, tmp_path):
    """Nor does TensorBoard; what there was to tell is there when they can be."""
    log, board = tmp_path / "log", tmp_path / "board"
    for path in (log, board):
        path.write_text("in its place")
    flags = data | LONG | dict(log_dir=str(log), tensorboard_dir=str(board), ckpt_dir=str(tmp_path / "c")) | EVERY
    world = start("1", flags, UNCHECKED)
    wait_for(lambda: (tmp_path / "c" / "iter_0000003").exists() or world.ended())
    assert not world.ended()
    for path in (log, board):
        path.unlink()
    wait_for(lambda: len(events(flags, "log_failed")) == 2 or world.ended())
    run = stopped(world)
    assert [event["iteration"] for event in events(flags, "iteration")] == list(range(1, len(run.records) + 1))
    failed = {event["what"]: event["lost"] for event in events(flags, "log_failed")}
    assert failed["events"] == 0 and failed["tensorboard"] > 0
    assert list(board.glob("events.out.tfevents.*"))
