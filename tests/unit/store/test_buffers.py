"""Host memory for snapshots: in place from the beginning, and with a name it outlives the process."""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from moc.store.buffers import HostBuffer
from moc.store.errors import CheckpointError
from tests.cases import each_row
from tests.errors import raises

ROOT = Path(__file__).parents[3]
WRITES_AND_DIES = """
import os, signal, sys
from pathlib import Path
import torch
from moc.store.buffers import HostBuffer
named, nameless = HostBuffer(8192, Path(sys.argv[1])), HostBuffer(8192)
for buffer in (named, nameless):
    buffer.view(4096, 4096 + 8, torch.float32).copy_(torch.tensor([1.5, -2.0]))
    buffer.memory[:5] = b"hello"
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_only_named_buffer_outlives_process(tmp_path):
    path = tmp_path / "slots" / "rank_00000.0"
    done = subprocess.run([sys.executable, "-c", WRITES_AND_DIES, str(path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    data = path.read_bytes()
    assert len(data) == 8192 and data[:5] == b"hello"
    assert torch.frombuffer(bytearray(data[4096:4104]), dtype=torch.float32).tolist() == [1.5, -2.0]
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [path]


def test_bytes_and_tensors_share_memory(tmp_path):
    buffer = HostBuffer(64, tmp_path / "buffer")
    buffer.view(8, 24, torch.bfloat16).fill_(1)
    assert bytes(buffer.memory[8:24]) == torch.ones(8, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert (tmp_path / "buffer").read_bytes() == bytes(buffer.memory)
    assert (tmp_path / "buffer").stat().st_mode & 0o777 == 0o600


def test_close_removes_only_its_own_name(tmp_path):
    buffer = HostBuffer(16, tmp_path / "buffer")
    buffer.memory[:4] = b"kept"
    os.link(tmp_path / "buffer", tmp_path / "published")
    buffer.close()
    assert not (tmp_path / "buffer").exists()
    assert (tmp_path / "published").read_bytes()[:4] == b"kept"
    HostBuffer(16).close()


def test_empty_buffer_is_supported():
    buffer = HostBuffer(0, pin=True)  # there is nothing to lock
    assert buffer.nbytes == 0 and not buffer.view(0, 0, torch.float32).numel()
    buffer.close()


@each_row("nbytes", [1, 2, 4097])
@each_row("name", ["buffer", None])
def test_buffer_has_requested_size(tmp_path, nbytes, name):
    buffer = HostBuffer(nbytes, name and tmp_path / name)
    assert len(buffer.memory) == buffer.values.numel() == buffer.nbytes == nbytes
    assert not buffer.values.any()
    assert name is None or (tmp_path / name).stat().st_size == nbytes


def test_buffer_never_overwrites_existing_file(tmp_path):
    (tmp_path / "buffer").write_bytes(b"somebody's")
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
        HostBuffer(4, tmp_path / "buffer")
    assert (tmp_path / "buffer").read_bytes() == b"somebody's"


@pytest.fixture
def small_memory(tmp_path):
    """A memory file system with one MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this machine does not let root mount a file system")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_too_little_memory_is_an_early_error(small_memory):
    remedies = ("--shm-size", "--ckpt-memory-dir", "--ckpt-tier disk")
    with raises("memory-full", f"{small_memory}/slots", "2,097,152", *remedies):
        HostBuffer(2 << 20, small_memory / "slots" / "rank_00000.0")
    assert not list((small_memory / "slots").iterdir())
    assert HostBuffer(1 << 19, small_memory / "slots" / "rank_00000.0").nbytes == 1 << 19


def test_failed_buffer_leaves_neither_file_nor_descriptor(tmp_path, monkeypatch):
    refuses = SimpleNamespace(cudaHostRegister=lambda *arguments: 1)
    monkeypatch.setattr("moc.store.buffers._cudart", lambda: refuses)
    with raises("memory-lock-refused", "ulimit"):
        HostBuffer(64, tmp_path / "buffer", pin=True)
    assert not list(tmp_path.iterdir())

    def fail(*arguments):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    before = os.listdir("/proc/self/fd")
    with raises("memory-full", "host memory"):
        HostBuffer(64)
    assert os.listdir("/proc/self/fd") == before


def test_memory_above_capacity_is_refused_before_allocation():
    nbytes = 2 * psutil.virtual_memory().total
    with raises("memory-full", f"{nbytes:,}", "a log", "--without"):
        HostBuffer(nbytes, purpose="a log", remedy="pass --without")
