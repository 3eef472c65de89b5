"""Whatever happens while a checkpoint is saved, the last complete one is whole."""

import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from moc.errors import codes_in
from moc.store import dense_files
from tests.integration.tiny import FLAGS, LAYOUTS, train
from tests.worlds import start_world

KILLS = 20


def wait_for(condition, seconds=240):
    """Waits until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def assert_whole(root: Path) -> int | None:
    """Checks the newest checkpoint as the next start will; its iteration."""
    iteration = dense_files.latest_iteration(root)
    if iteration is not None:
        directory = dense_files.checkpoint_path(root, iteration)
        manifest = dense_files.read_manifest(directory)
        assert dense_files.find_damage(directory, manifest["files"]) is None
    return iteration


@pytest.mark.recovery
@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "async"])
def test_kill_during_save_keeps_valid_checkpoint(asynchronous, data, tmp_path):
    root, chance = tmp_path / "saved", random.Random(asynchronous)
    flags = data | dict(train_iters=1000, save_interval=1, async_save=asynchronous)
    flags |= dict(save=str(root), load=str(root))
    size, parallel = LAYOUTS["EP2"]
    reached = []
    for _ in range(KILLS // 2):
        world = start_world(size, "tests.integration.bodies:train", flags=FLAGS | parallel | flags)
        wait_for(lambda world=world: any(root.glob(".iter_*.incomplete")) or world.ended())
        time.sleep(chance.uniform(0, 0.4))
        world.kill()
        assert {result.exit for result in world.wait()} == {-9}  # and no process is left
        reached.append(assert_whole(root) or 0)
    assert reached == sorted(reached)
    stop = dict(train_iters=1000, exit_interval=reached[-1] + 3)
    ended = train("EP2", flags | stop)
    assert ended.start == reached[-1]
    straight = train("EP2", data | stop)
    assert ended.records == straight.records[ended.start :]
    assert ended.weights == straight.weights
    assert not list(root.glob(".iter_*"))


@pytest.fixture
def small_disk(tmp_path):
    """A function that leaves so many KiB on a small disk, and the disk."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs root, to mount a small tmpfs")

    def fill(kib):
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        (disk / "filler").write_bytes(bytes(free - 1024 * kib))

    yield fill, disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    ("kib", "asynchronous"),  # weights have some 250 KiB, and what is the optimizer's 750
    [(0, True), (30, False), (150, True), (150, False), (600, False), (600, True)],
)
def test_full_disk_keeps_last_checkpoint(kib, asynchronous, small_disk, data):
    fill, disk = small_disk
    flags = data | dict(save=str(disk / "saved"), load=str(disk / "saved"), async_save=asynchronous, train_iters=4)
    train("EP2", flags | dict(exit_interval=1))
    fill(kib)
    size, parallel = LAYOUTS["EP2"]
    world = start_world(size, "tests.integration.bodies:train", flags=FLAGS | parallel | flags)
    assert_refused(world, at_start=False)  # it trains, and only its saves fail
    (disk / "filler").unlink()
    assert assert_whole(disk / "saved") == 1
    assert train("EP2", flags).start == 1


@pytest.mark.parametrize("limit", [30_000, 300_000])
def test_file_size_limit_keeps_last_checkpoint(limit, data, tmp_path):
    flags = data | dict(save=str(tmp_path), load=str(tmp_path), train_iters=4)
    train("EP2", flags | dict(exit_interval=1))
    size, parallel = LAYOUTS["EP2"]
    flags = FLAGS | parallel | flags
    world = start_world(size, "tests.integration.bodies:train_with_small_files", flags=flags, limit=limit)
    assert_refused(world, at_start=limit < 64 << 10)
    assert assert_whole(tmp_path) == 1


def assert_refused(world, at_start):
    results = world.wait()  # at the start, the first worker checks the directory, and the others wait for it
    for result in results[:1] if at_start else results:
        assert result.exit == (2 if at_start else 1), result.output
        said = [line for line in result.output.splitlines() if "pretrain_gpt_moe.py: error" in line]
        codes = {"output-not-writable"} if at_start else {"storage-unwritable", "disk-full"}
        assert len(said) == 1 and codes.issuperset(codes_in(said[0])), result.output
        assert "Traceback" not in result.output, result.output


def test_old_checkpoints_are_removed_except_retain_interval(data, tmp_path):
    train("1", data | dict(save=str(tmp_path), save_interval=1, save_retain_interval=3, train_iters=8))
    assert dense_files.list_iterations(tmp_path) == [3, 6, 8]


def test_other_run_does_not_overwrite_checkpoint(data, tmp_path):
    flags = FLAGS | data | dict(save=str(tmp_path), train_iters=2)
    train("1", flags)
    before = dense_files.read_manifest(dense_files.checkpoint_path(tmp_path, 2))
    (result,) = start_world(1, "tests.integration.bodies:train", flags=flags | dict(seed=5)).wait()
    assert result.exit == 1 and codes_in(result.output) == ["save-of-another-run"], result.output
    assert dense_files.read_manifest(dense_files.checkpoint_path(tmp_path, 2)) == before


def test_writer_processes_die_with_their_worker(data, tmp_path):
    body = "tests.integration.bodies:die_while_writing"
    world = start_world(1, body, flags=FLAGS | data | dict(save=str(tmp_path), train_iters=1))
    assert [result.exit for result in world.wait()] == [-9]  # wait() finds processes that are left
    assert dense_files.list_iterations(tmp_path) == []
