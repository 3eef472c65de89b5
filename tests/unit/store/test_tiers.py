"""Memory of this node: in a directory that nobody else can read or plant."""

import itertools
import os
import re
import shutil

import pytest

from moc.store.errors import CheckpointError
from moc.store.runs import begin_run, run_of
from moc.store.storage import LocalPlace
from moc.store.tiers import memory_found, memory_of_other_runs, memory_place
from tests.unit.store.turns import in_turns


def home(tmp_path):
    return tmp_path / f"moc-{os.geteuid()}"


def test_jobs_have_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jobs = "/a/ckpt", "/b/ckpt", "s3://a/ckpt", "s3://b/ckpt"
    roots = {job: memory_place(tmp_path, job, "run").root for job in jobs}
    assert len(set(roots.values())) == 4
    assert all(root.parent == home(tmp_path) and root.name.startswith("ckpt-") for root in roots.values())
    assert home(tmp_path).stat().st_mode & 0o777 == 0o700
    for same in ("/a/ckpt/", "/a/x/../ckpt"):
        assert memory_place(tmp_path, same, "run").root == roots["/a/ckpt"]
    assert memory_place(tmp_path, "ckpt", "run").root == memory_place(tmp_path, str(tmp_path / "ckpt"), "run").root


def test_runs_at_one_address_have_directories_of_their_own(tmp_path):
    storage = LocalPlace(tmp_path / "ckpt")
    first = begin_run(storage, "/data/ckpt")
    assert begin_run(storage, "/mnt/ckpt") == run_of(storage) == first  # as long as it is not removed
    shutil.rmtree(storage.root)
    second = begin_run(storage, "/data/ckpt")
    roots = [
        memory_place(tmp_path, "/data/ckpt", run.run, node).root for run in (first, second) for node in (None, "1")
    ]
    assert len(set(roots)) == 4
    for root in roots:
        root.mkdir()
    memory_place(tmp_path, "/other/ckpt", first.run).root.mkdir()
    assert memory_of_other_runs(tmp_path, "/data/ckpt", second.run) == roots[:2]
    assert memory_found(tmp_path, str(storage.root)).root.name.endswith(second.run)


def test_of_two_that_begin_a_run_at_once_one_does(tmp_path):
    actions = [lambda: begin_run(LocalPlace(tmp_path / "ckpt"), "ckpt")] * 2
    orders = itertools.product([0, 1], repeat=6)
    for order in orders:
        one, other = in_turns(actions, order)
        assert one.result == other.result == run_of(LocalPlace(tmp_path / "ckpt")) is not None
        assert os.listdir(tmp_path / "ckpt") == [".run.json"]
        shutil.rmtree(tmp_path / "ckpt")


def test_a_run_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / ".run.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"\.run\.json does not say which run this is .*: restore it, or remove"):
        begin_run(LocalPlace(tmp_path), "ckpt")


def refused(tmp_path):
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(home(tmp_path)))} .*--ckpt-memory-dir"):
        memory_place(tmp_path, "job", "run")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o710, 0o701, 0o755])
def test_a_directory_that_others_can_use_is_refused(tmp_path, mode):
    home(tmp_path).mkdir()
    home(tmp_path).chmod(mode)
    refused(tmp_path)


def test_a_link_is_refused(tmp_path):
    (tmp_path / "theirs").mkdir(mode=0o700)
    home(tmp_path).symlink_to(tmp_path / "theirs")
    refused(tmp_path)
    (tmp_path / "theirs").rmdir()
    refused(tmp_path)  # it leads nowhere


def test_a_file_is_refused(tmp_path):
    home(tmp_path).touch(mode=0o600)
    refused(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a directory away needs root")
def test_somebody_elses_directory_is_refused(tmp_path):
    home(tmp_path).mkdir(mode=0o700)
    os.chown(home(tmp_path), 12345, 12345)
    refused(tmp_path)


def test_a_memory_file_system_that_is_not_there_is_named(tmp_path):
    refused(tmp_path / "missing")
