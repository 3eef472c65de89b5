"""Jobs that are killed or whose disk is full: the same command continues, and no saved checkpoint changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moc.errors import codes_in
from moc.store import dense_files, ownership
from moc.store.dense_files import Lineage
from moc.store.errors import TakenError
from moc.store.ownership import Claim, Fence
from moc.store.storage import LocalStorage
from moc.store.store import Store
from tests.integration.entry_jobs import USER_SCRIPT, run
from tests.integration.mounts import mounted
from tests.unit.store.test_store import saved

KEEP_SCHEDULE = "--override-opt-param-scheduler --use-distributed-optimizer --save-interval 2"
KILL = "--inject", "kill ranks=0 iteration=8 point=persisting"


def manifests(root: Path) -> dict[int, str]:
    """The manifests of all checkpoints, which have the hashes of their files."""
    found = dense_files.list_iterations(root)
    return {i: (dense_files.checkpoint_path(root, i) / "manifest.json").read_text() for i in found}


@pytest.mark.slow
@pytest.mark.recovery
def test_killed_run_resumes_from_its_save_directory(tmp_path):
    first = run(tmp_path, USER_SCRIPT, 1, f"{KEEP_SCHEDULE} --save A --exit-interval 4", log="first")
    assert first.code == 0, first.output[-3000:]
    command = f"{KEEP_SCHEDULE} --load A --save B"
    killed = run(tmp_path, USER_SCRIPT, 1, command, *KILL, launcher="--max-restarts 0", log="killed")
    before = manifests(tmp_path / "B")
    assert killed.code != 0 and min(killed.losses) == 5 and [*before] == [6]
    other = run(tmp_path, USER_SCRIPT, 1, f"{command} --finetune", log="other")
    assert other.code == 1 and codes_in(other.output) == ["save-of-another-run"] and not other.losses
    (tmp_path / "B" / dense_files.TRACKER_FILE).unlink()  # as by a kill between the publication and the tracker file
    again = run(tmp_path, USER_SCRIPT, 1, command, log="again")
    assert again.code == 0 and min(again.losses) == 7, again.output[-3000:]
    assert again.losses[7] == killed.losses[7] and manifests(tmp_path / "B").items() > before.items()


@pytest.mark.slow
@pytest.mark.recovery
@pytest.mark.parametrize("finetune", ["--finetune", ""])
def test_run_resumes_despite_lost_tracker_file(finetune, tmp_path):
    begun = run(tmp_path, USER_SCRIPT, 1, f"{KEEP_SCHEDULE} --save A --exit-interval 4", log="first")
    assert begun.code == 0, begun.output[-3000:]
    command = f"{KEEP_SCHEDULE} --load A --save {'B' if finetune else 'A'} {finetune}"
    if finetune:
        assert run(tmp_path, USER_SCRIPT, 1, f"{command} --exit-interval 6", log="tuned").code == 0
    root = tmp_path / ("B" if finetune else "A")
    before, newest = manifests(root), dense_files.latest_iteration(root) or 0
    (root / dense_files.TRACKER_FILE).unlink()
    again = run(tmp_path, USER_SCRIPT, 1, f"{command} --seed 99", log="again")
    assert again.code == 0 and min(again.losses) == newest + 1, again.output[-3000:]
    assert manifests(root).items() > before.items()


@pytest.mark.slow
def test_snapshots_of_another_run_in_directory_are_refused(tmp_path):
    snapshots = f"{KEEP_SCHEDULE} --ckpt-policy full --snapshot-interval 2 --ckpt-dir C"
    assert run(tmp_path, USER_SCRIPT, 1, f"{KEEP_SCHEDULE} --save A --exit-interval 4 --seed 7", log="A").code == 0
    assert run(tmp_path, USER_SCRIPT, 1, f"{snapshots} --exit-interval 6", log="C").code == 0
    tuned = run(tmp_path, USER_SCRIPT, 1, f"{snapshots} --load A --finetune", log="tuned")
    assert tuned.code == 1 and codes_in(tuned.output) == ["snapshots-of-another-run"] and not tuned.losses
    again = run(tmp_path, USER_SCRIPT, 1, f"{snapshots} --save B", log="again")
    assert again.code == 0 and min(again.losses) == 7, again.output[-3000:]


@pytest.mark.slow
@pytest.mark.recovery
@pytest.mark.parametrize("snapshots", [False, True])
def test_run_resumes_if_leftovers_of_killed_save_fill_disk(snapshots, tmp_path):
    with mounted(tmp_path / "disk", "24m") as disk:
        flags = f"--use-distributed-optimizer --log-dir {tmp_path}/log"
        if snapshots:
            flags += f" --ckpt-policy full --snapshot-interval 2 --ckpt-dir {disk}/C"
            leftover = disk / "C/iter_0000008/rank_00000.safetensors"
        else:
            flags += f" --save {disk}/B --load {disk}/B --save-interval 2"
            leftover = disk / "B/.iter_0000008.dead-0-0.incomplete/__0_0.distcp"
        begun = run(tmp_path, USER_SCRIPT, 1, f"{flags} --exit-interval 4")
        assert begun.code == 0, begun.output[-3000:]
        leftover.parent.mkdir(exist_ok=True)
        fill(leftover)
        again = run(tmp_path, USER_SCRIPT, 1, flags)
        assert again.code == 0 and not again.of("save_failed"), again.output[-3000:]
        assert max(begun.losses) == 4 and max(again.losses) == 8
        assert not leftover.exists() or leftover.stat().st_size < 12 << 20
        if not snapshots:
            assert dense_files.latest_iteration(disk / "B") == 8


@pytest.mark.slow
@pytest.mark.recovery
@pytest.mark.parametrize("snapshots", [False, True])
def test_full_disk_at_start_fails_saves_but_not_training(snapshots, tmp_path):
    """Saves fail, and training does not; the exit code reports that the last state is not saved."""
    with mounted(tmp_path / "disk", "24m") as disk:
        flags = (
            f"--use-distributed-optimizer --log-dir {tmp_path}/log --save {disk}/B --load {disk}/B --save-interval 2"
        )
        if snapshots:
            flags += " --ckpt-policy full --snapshot-interval 2"
        assert run(tmp_path, USER_SCRIPT, 1, f"{flags} --exit-interval 4").code == 0
        fill(disk / "filler")
        again = run(tmp_path, USER_SCRIPT, 1, flags)
        assert again.code == 1 and max(again.losses) == 8, again.output[-3000:]
        assert again.of("save_failed") and not [*disk.glob("B/.iter_*")]
        os.unlink(disk / "filler")
        rest = run(tmp_path, USER_SCRIPT, 1, flags)
        assert rest.code == 0 and dense_files.latest_iteration(disk / "B") == 8, rest.output[-3000:]


def test_unfinished_save_is_removed_before_fence_is_written(tmp_path):
    with mounted(tmp_path / "disk", "256k") as disk:
        leftover = disk / ".iter_0000004.dead-0-0.incomplete"
        leftover.mkdir()
        fill(leftover / "__0_0.distcp")
        staging = dense_files.begin_save(disk, 6, Fence(disk, Claim("new")))
        assert staging.is_dir() and not leftover.exists()


def test_save_in_progress_of_live_launch_is_kept(tmp_path):
    with mounted(tmp_path / "disk", "256k") as disk:
        other = Fence(disk, Claim("other"))
        other.take()
        staging = dense_files.staging_path(disk, 4, "other-0-0")
        staging.mkdir()
        fill(staging / "__0_0.distcp")
        with pytest.raises((TakenError, OSError)):
            dense_files.begin_save(disk, 6, Fence(disk, Claim("new"), patience=0.1))
        assert staging.is_dir() and (staging / "__0_0.distcp").stat().st_size
        assert ownership.lives(disk) is not None
        del other  # its lock file is on the disk


@pytest.mark.parametrize("leftover", [True, False])
def test_snapshots_start_on_full_disk(leftover, tmp_path):
    with mounted(tmp_path / "disk", "512k") as disk:
        store = Store(LocalStorage(disk / "C", claim=Claim("job", (0, 1), "0123456789abcdef")))
        saved(store, 2)
        part = disk / "C/iter_0000004/rank_00000.safetensors" if leftover else disk / "filler"
        part.parent.mkdir(exist_ok=True)
        fill(part)
        store = Store(LocalStorage(disk / "C", claim=Claim("job", (0, 2), "0123456789abcdef")))
        store.take()
        assert part.exists() is not leftover and (disk / "C/iter_0000002").is_dir()
        del store
        ownership._newest.clear()  # lock files on the disk


def test_concurrent_save_of_another_run_is_refused(tmp_path):
    for run_name, job in (("first", "one"), ("second", "two")):
        held = Fence(tmp_path, Claim(job))
        dense_files.begin_save(tmp_path, 2, held)
        if job == "two":
            with pytest.raises(TakenError, check=lambda error: error.code == "save-of-another-run"):
                dense_files.publish_save(tmp_path, 2, {}, held, lineage=Lineage(run_name))
        else:
            dense_files.publish_save(tmp_path, 2, {}, held, lineage=Lineage(run_name))
        del held
    assert dense_files.published(tmp_path)[0].job == "one"


def fill(path: Path) -> None:
    """Writes a file until the disk is full."""
    with open(path, "wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 12)):
                pass
        except OSError:
            pass
