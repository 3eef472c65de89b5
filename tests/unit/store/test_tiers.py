"""Memory of this node: in a directory that nobody else can read or plant."""

import os
import re

import pytest

from moc.store.errors import CheckpointError
from moc.store.tiers import memory_place


def home(tmp_path):
    return tmp_path / f"moc-{os.geteuid()}"


def test_jobs_have_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    roots = {job: memory_place(tmp_path, job).root for job in ("/a/ckpt", "/b/ckpt", "s3://a/ckpt", "s3://b/ckpt")}
    assert len(set(roots.values())) == 4
    assert all(root.parent == home(tmp_path) and root.name.startswith("ckpt-") for root in roots.values())
    assert home(tmp_path).stat().st_mode & 0o777 == 0o700
    assert memory_place(tmp_path, "/a/ckpt/").root == roots["/a/ckpt"] == memory_place(tmp_path, "/a/x/../ckpt").root
    assert memory_place(tmp_path, "ckpt").root == memory_place(tmp_path, str(tmp_path / "ckpt")).root


def refused(tmp_path):
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(home(tmp_path)))} .*--ckpt-memory-dir"):
        memory_place(tmp_path, "job")


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
