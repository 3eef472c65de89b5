"""Snapshots are hashed by a process of their own, or by the thread that asks where that cannot be."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor, TimeoutError

import psutil
import pytest

from moc.runtime import child_processes
from moc.session.helpers import Hasher
from moc.snapshot.saver import hashed
from moc.store.buffers import HostBuffer
from tests.errors import only_code

SPANS = [(4096, 8192), (8192, 8192), (10_000, 300_000), (300_000, 1 << 20)]


@pytest.fixture
def hasher():
    one = Hasher()
    yield one
    one.close()


def start(hasher, buffer) -> None:
    """Waits until the process of a hasher has started."""
    while not (hasher._was_started and hasher._helper.has_started()):
        assert hasher.digests(buffer, SPANS) == hashed(buffer, SPANS)


def filled(path=None) -> HostBuffer:
    buffer = HostBuffer(1 << 20, path)
    buffer.memory[:] = os.urandom(1 << 20)
    return buffer


def test_process_and_thread_compute_same_hashes(hasher, tmp_path):
    buffer = filled(tmp_path / "slot")
    start(hasher, buffer)
    assert hasher.digests(buffer, SPANS) == hashed(buffer, SPANS)
    (process,) = hasher.processes
    buffer.memory[5000] ^= 1  # it looks again each time
    assert hasher.digests(buffer, SPANS) == hashed(buffer, SPANS)
    assert hasher.processes == [process] and process != os.getpid()


def test_hashing_process_keeps_no_memory_mapped(hasher, tmp_path):
    buffer = filled(tmp_path / "slot")
    start(hasher, buffer)
    (process,) = hasher.processes
    assert not [one for one in psutil.Process(process).memory_maps() if str(tmp_path) in one.path]
    assert not psutil.Process(process).open_files()


def test_buffer_without_file_is_hashed_by_thread(hasher):
    buffer = filled()
    assert hasher.digests(buffer, SPANS) == hashed(buffer, SPANS) and hasher.processes == []


def test_thread_hashes_until_process_is_ready(hasher, tmp_path, monkeypatch):
    buffer = filled(tmp_path / "slot")
    monkeypatch.setattr(child_processes, "module_command", lambda *_, **__: ["sleep", "600"])
    assert hasher.digests(buffer, SPANS) == hashed(buffer, SPANS) and hasher._helper.is_running and not hasher.processes


def test_hasher_lost_before_start_is_replaced_by_thread(hasher, tmp_path, monkeypatch, capfd):
    buffer = filled(tmp_path / "slot")
    monkeypatch.setattr(child_processes, "module_command", lambda *_, **__: ["true"])
    while not hasher._failed:
        assert hasher.digests(buffer, SPANS) == hashed(buffer, SPANS)
    said = capfd.readouterr().err
    assert only_code(said) == "helper-lost" and "has died" in said


def test_thread_hashes_after_process_death_with_one_warning(hasher, tmp_path, capfd):
    buffer = filled(tmp_path / "slot")
    start(hasher, buffer)
    (process,) = hasher.processes
    os.kill(process, signal.SIGKILL)
    for _ in range(2):
        assert hasher.digests(buffer, SPANS) == hashed(buffer, SPANS)
    assert hasher.processes == [] and not psutil.pid_exists(process)
    said = capfd.readouterr().err
    assert said.count("WARNING") == 1 and only_code(said) == "helper-lost"


def test_thread_hashes_if_process_does_not_reply(hasher, tmp_path, capfd):
    buffer = filled(tmp_path / "slot")
    start(hasher, buffer)
    (process,) = hasher.processes
    hasher._helper.timeout_s = 0.1
    os.kill(process, signal.SIGSTOP)
    assert hasher.digests(buffer, SPANS) == hashed(buffer, SPANS)
    said = capfd.readouterr().err
    assert not psutil.pid_exists(process) and only_code(said) == "helper-lost" and "0.1 s" in said


def test_thread_finishes_hashing_after_close(hasher, tmp_path, capfd):
    buffer = filled(tmp_path / "slot")
    start(hasher, buffer)
    os.kill(hasher.processes[0], signal.SIGSTOP)
    with ThreadPoolExecutor(1) as beside:
        asked = beside.submit(hasher.digests, buffer, SPANS)
        with pytest.raises(TimeoutError):
            asked.result(timeout=0.1)
        hasher.close()
        assert asked.result(timeout=60) == hashed(buffer, SPANS)
    assert not capfd.readouterr().err


def test_file_of_different_size_is_not_hashed(hasher, tmp_path, capfd):
    buffer = filled(tmp_path / "slot")
    start(hasher, buffer)
    buffer.path.unlink()
    buffer.path.write_bytes(bytes(9000))
    assert hasher.digests(buffer, SPANS) == hashed(buffer, SPANS)
    said = capfd.readouterr().err
    assert only_code(said) == "helper-lost" and "9,000" in said and "1,048,576" in said


def test_thread_hashes_if_file_was_unlinked(hasher, tmp_path):
    buffer = filled(tmp_path / "slot")
    start(hasher, buffer)
    buffer.path.unlink()
    assert hasher.digests(buffer, SPANS) == hashed(buffer, SPANS)


def test_hashing_process_ends_with_thread_that_started_it(hasher, tmp_path):
    buffer = filled(tmp_path / "slot")
    with ThreadPoolExecutor(1) as one:
        process = one.submit(lambda: (start(hasher, buffer), hasher.processes[0])[1]).result()
    psutil.wait_procs([psutil.Process(process)] if psutil.pid_exists(process) else [], timeout=60)
    assert not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    assert hasher.digests(buffer, SPANS) == hashed(buffer, SPANS)
