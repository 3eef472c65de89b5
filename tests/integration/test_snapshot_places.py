"""Full disks, little memory, other jobs, other nodes: one sentence if it cannot go on, and nothing saved is lost."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.host_memory import find_memory_storage
from tests.integration.mounts import mounted
from tests.integration.snapshot_files import (
    EVERY,
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

MEMORY = dict(ckpt_tier="memory")


@pytest.fixture
def flags(data, tmp_path):
    """Of a run that takes a snapshot in each iteration."""
    with node_memory() as memory:
        places = dict(ckpt_dir=str(tmp_path / "snapshots"), ckpt_memory_dir=memory, log_dir=str(tmp_path / "log"))
        yield data | EVERY | places


def assert_refused(world, *words: str) -> None:
    """All workers end with an error, in one sentence that says these words."""
    for result in world.wait():
        assert result.exit == 1, result.output
        (said,) = (line for line in result.output.splitlines() if ".py: error" in line)
        assert all(word in said for word in words), said
        assert "Traceback" not in result.output, result.output


def fill(disk: Path, kib: int) -> Path:
    """Leaves so much space; the file that takes the rest."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "filler").write_bytes(bytes(free - 1024 * kib))
    return disk / "filler"


@pytest.mark.parametrize(
    ("layout", "free_kib", "blocking"),  # each of two workers writes some 240 KiB; with Megatron's engine, 400
    [("plain DP2", kib, blocking) for kib in (0, 30, 200, 400) for blocking in (False, True)]
    + [("EP2", 300, False), ("EP2", 600, True)],
)
def test_full_disk_ends_run_and_run_resumes_after_cleanup(layout, free_kib, blocking, flags, tmp_path):
    with mounted(tmp_path / "disk", "10m") as disk:
        flags = flags | dict(ckpt_dir=str(disk / "snapshots"), ckpt_blocking=blocking)
        train(layout, flags | dict(exit_interval=1))
        filler = fill(disk, free_kib)
        assert_refused(start(layout, flags), str(disk), "make room")
        assert newest_whole(flags) == 1
        filler.unlink()
        assert train(layout, flags).start == 1


def test_read_only_disk_ends_run_and_run_resumes_when_writable(flags, tmp_path):
    with mounted(tmp_path / "disk", "10m") as disk:
        flags = flags | dict(ckpt_dir=str(disk / "snapshots"))
        train("plain DP2", flags | dict(exit_interval=1))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert_refused(start("plain DP2", flags), str(disk), "Read-only", "permissions")
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        assert train("plain DP2", flags).start == 1


@pytest.mark.parametrize(
    ("layout", "size"),  # a worker's buffer has some 240 KiB; with Megatron's engine, 400
    [("plain DP2", "64k"), ("plain DP2", "360k"), ("plain DP2", "1060k"), ("EP2", "1800k")],
)
def test_too_small_memory_tier_is_refused(layout, size, flags, tmp_path):
    train(layout, flags | dict(exit_interval=1))
    with mounted(tmp_path / "memory", size) as memory:
        assert_refused(start(layout, flags | MEMORY | dict(ckpt_memory_dir=str(memory))), str(memory), "[memory-full]")
    rest = train(layout, flags)
    assert rest.start in (1, 2, 3)  # it may have come some way


@pytest.mark.parametrize("tier", ["disk", "memory"])
def test_second_job_in_same_directory_is_refused(tier, data, flags):
    flags = flags | dict(ckpt_tier=tier, exit_signal_handler=True, train_iters=5000)
    first = start("EP2", flags)
    wait_for(lambda: newest_iterations(flags))
    second = start("EP2", flags | dict(log_dir=None), "snapshot_bodies:train_impatiently")
    assert_refused(second, "[directory-in-use]", flags["ckpt_dir"])
    os.kill(first.pids[0], 15)
    run = told(first)
    assert run.codes == [75, 75]
    undisturbed = train("EP2", data | dict(train_iters=5000, exit_interval=len(run.records)))
    assert run.losses == undisturbed.losses and run.weights == undisturbed.weights
    assert newest_whole(flags) == len(run.records)


def test_memory_locked_by_other_job_is_refused(flags, tmp_path):
    """It is locked by itself, since storage may be locked on another node."""
    flags = flags | MEMORY | dict(train_iters=5000)
    first = start("plain DP2", flags)
    wait_for(lambda: newest_iterations(flags))
    memory = stores(flags)["memory"].storage
    (tmp_path / "snapshots" / ".fence").unlink()
    assert_refused(start("plain DP2", flags | dict(log_dir=None), "snapshot_bodies:train_impatiently"), memory.name)
    refused_at = max(newest_iterations(flags))
    wait_for(lambda: first.ended() or max(newest_iterations(flags)) > refused_at + 3)  # its buffers are untouched
    first.kill()
    results = first.wait()
    assert {result.exit for result in results} == {-9}, results[0].output[-1500:]


def newest_iterations(flags: dict) -> list[int]:
    """Iterations of the snapshots that are published in any tier."""
    return [iteration for store in stores(flags).values() for iteration in store.iterations()]


@pytest.mark.recovery
@pytest.mark.parametrize("layout", ["EP2", "DP2"])
def test_partial_memory_of_each_node_restores_killed_job(layout, data, flags):
    flags = flags | MEMORY | dict(node_of_rank="0,1", train_iters=1000)
    world = start(layout, flags)
    wait_for(lambda: world.ended() or events(flags, "snapshot")[2:])
    world.kill()
    assert {result.exit for result in world.wait()} == {-9}
    taken = max(event["iteration"] for event in events(flags, "snapshot"))
    stop = dict(train_iters=1000, exit_interval=taken + 5)
    rest, straight = train(layout, flags | stop), train(layout, data | stop)
    assert rest.start >= taken - 1 >= 2
    assert events(flags, "resume")[0]["tier"] == "memory"
    assert rest.records == straight.records[rest.start :]
    assert rest.weights == straight.weights
    assert whole(flags | dict(ckpt_tier="disk"))["storage"] == [taken + 5]


@pytest.mark.recovery
def test_lost_memory_of_one_node_falls_back_to_storage(data, flags):
    flags = flags | MEMORY | dict(node_of_rank="0,1", persist_interval=2, train_iters=1000)
    world = start("EP2", flags)
    wait_for(lambda: world.ended() or events(flags, "persist"))
    world.kill()
    world.wait()
    shutil.rmtree(find_memory_storage(flags["ckpt_memory_dir"], flags["ckpt_dir"], "1").root)
    newest = newest_whole(flags | dict(ckpt_tier="disk"))
    stop = dict(train_iters=1000, exit_interval=newest + 5)
    rest, straight = train("EP2", flags | stop), train("EP2", data | stop)
    assert rest.start == newest >= 2
    assert rest.records == straight.records[newest:]
    assert rest.weights == straight.weights
