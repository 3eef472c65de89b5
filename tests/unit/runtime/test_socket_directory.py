"""The directory of a node's sockets: for one user alone, removed with the job, or by the next one."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from moc.runtime import socket_directory as module
from moc.runtime.socket_directory import memory_directory_of, socket_directory
from moc.store.host_memory import SOCKETS_DIRECTORY, leftovers, user_directory
from tests.cases import each_row
from tests.unit.conftest import REPOSITORY

HOLDS = """
import sys, time
from pathlib import Path
from moc.runtime.socket_directory import socket_directory
with socket_directory(sys.argv[1]) as directory:
    (directory / "agent").touch()
    print(directory, flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def job(tmp_path):
    """A process that has a directory, and the directory."""
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_directory_is_private_and_removed_with_job(tmp_path):
    with socket_directory(str(tmp_path)) as directory, socket_directory(str(tmp_path)) as other:
        home = user_directory(tmp_path)
        assert directory.parent == other.parent == home / SOCKETS_DIRECTORY and directory != other
        for path in (home, home / SOCKETS_DIRECTORY, directory):
            assert path.stat().st_mode & 0o777 == 0o700
        (directory / "agent").touch()
        assert leftovers(tmp_path) == []  # it holds no snapshots
    assert os.listdir(home) == []


def test_directory_is_removed_after_error(tmp_path):
    with contextlib.suppress(KeyError), socket_directory(str(tmp_path)):
        raise KeyError
    assert os.listdir(user_directory(tmp_path)) == []


def test_next_job_removes_directory_of_killed_job_only(tmp_path, job):
    process, directory = job
    for number in (None, signal.SIGSTOP):  # a stopped job has not ended
        if number is not None:
            process.send_signal(number)
        with socket_directory(str(tmp_path)):
            assert (directory / "agent").exists()
    process.kill()
    process.wait()
    assert (directory / "agent").exists()
    with socket_directory(str(tmp_path)) as mine:
        assert os.listdir(directory.parent) == [mine.name]


def test_directory_removed_before_lock_is_recreated(tmp_path, monkeypatch):
    lock, taken = module._lock, []

    def late(path):
        if not taken:
            taken.append(path)
            path.rmdir()
            path.parent.rmdir()
        return lock(path)

    monkeypatch.setattr(module, "_lock", late)
    with socket_directory(str(tmp_path)) as directory:
        assert directory.exists() and directory != taken[0]


def taken(memory: Path) -> None:
    """Takes all names that a user's memory may have."""
    for number in range(100):
        (memory / f"moc-{os.geteuid()}{f'-{number}' if number else ''}").touch()


@each_row("prevent", [taken, Path.rmdir], ids=["all names are taken", "there is no memory"])
@each_row("runtime", [True, False], ids=["XDG_RUNTIME_DIR", "temporary directory"])
def test_temporary_directory_is_used_without_memory(tmp_path, monkeypatch, prevent, runtime):
    memory, temporary = tmp_path / "memory", tmp_path / "temporary"
    for path in (memory, temporary):
        path.mkdir()
    prevent(memory)
    monkeypatch.setattr(module, "_MEMORY", str(memory))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere" if runtime else temporary))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(temporary if runtime else tmp_path / "missing"))
    left = temporary / f"moc-sockets-{os.geteuid()}-left"
    left.mkdir()
    (temporary / "others").mkdir()
    with socket_directory(str(memory)) as directory:
        assert directory.parent == temporary and directory.stat().st_mode & 0o777 == 0o700
        assert not left.exists()
    assert os.listdir(temporary) == ["others"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of a directory")
def test_directory_of_other_user_is_not_removed(tmp_path):
    with socket_directory(str(tmp_path)) as directory:
        other = directory.parent / "other"
        other.mkdir()
        os.chown(other, 12345, 12345)
        with socket_directory(str(tmp_path)):
            assert other.exists()


@each_row(
    ("flags", "memory"),
    [
        ([], "/dev/shm"),
        (["--ckpt-memory-dir", "/memory", "--lr", "1"], "/memory"),
        (["--lr=-1", "--ckpt-memory-dir=/memory"], "/memory"),
        (["--ckpt-memory-dir"], "/dev/shm"),
        (["--ckpt", "/other"], "/dev/shm"),
    ],
)
def test_memory_directory_is_read_from_program_flags(flags, memory):
    assert memory_directory_of(["program.py", *flags]) == memory
