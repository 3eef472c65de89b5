"""Buffers survive a generation, and none that holds a published snapshot is written to."""

import threading
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from moc.session.resume.survivors import LocalRemains
from moc.session.session import Session
from moc.snapshot import saver as module
from moc.snapshot.buffer_pool import KeptBuffers
from moc.snapshot.contents import share
from moc.snapshot.saver import Saver
from moc.store.buffers import HostBuffer
from tests.unit.snapshot.test_saver import CPU, OPERATORS, assert_holds, memory, state_of, storage, values

__all__ = ["memory", "storage"]  # fixtures


@pytest.fixture
def kept() -> KeptBuffers:
    return KeptBuffers()


@pytest.fixture
def no_new_buffer():
    """From the moment it is entered on, no buffer may be made."""
    return mock.patch.object(module, "HostBuffer", side_effect=AssertionError("a buffer is allocated"))


def inode(buffer: HostBuffer) -> int:
    assert buffer.path is not None
    return buffer.path.stat().st_ino


def test_next_generation_reuses_buffers_and_keeps_committed(memory, kept, no_new_buffer):
    state = state_of(6, 2)
    expected = values(state)
    before = Saver(0, CPU, memory, None, kept=kept)
    before.reserve(1, share(state).layout.nbytes)
    taken = before.take(0, 7, share(state), OPERATORS)
    part, held = taken.finalized.result(), inode(taken.buffer)
    before.close()

    file = memory.storage.root / "iter_0000007" / part.name
    with no_new_buffer:
        after = Saver(0, CPU, memory, None, kept=kept)
        after.reuse_buffers([7])
        after.reserve(1, share(state).layout.nbytes)  # as if recovery had to have more than what is published
        for one in state:
            one.view.add_(1)
        assert inode(after.take(1, 8, share(state), OPERATORS).buffer) != held
        assert_holds(file, part, state, expected)
        memory.remove(7)  # the newer one is safe
        newer = values(state)
        again = after.take(0, 9, share(state), OPERATORS)
        written = again.finalized.result()
        assert inode(again.buffer) == held
    assert_holds(memory.storage.root / "iter_0000009" / written.name, written, state, newer)
    after.close()


def test_committed_buffer_is_not_reused(memory, kept):
    """Such as by a run that resumes from elsewhere; its memory is given back once there is no slot for it."""
    state = state_of(6, 2)
    expected = values(state)
    before = Saver(0, CPU, memory, None, kept=kept)
    part = before.take(0, 7, share(state), OPERATORS).finalized.result()
    before.close()
    for one in state:
        one.view.add_(1)
    after = Saver(0, CPU, memory, None, kept=kept)
    after.take(0, 8, share(state), OPERATORS).finalized.result()
    assert len(kept.paths) == 1
    after.trim(1)
    assert not kept.paths
    assert_holds(memory.storage.root / "iter_0000007" / part.name, part, state, expected)
    after.close()


def test_buffer_read_by_storage_is_not_reused(storage, kept):
    state, begun, goes_on = state_of(6, 2), threading.Event(), threading.Event()
    saver = Saver(0, CPU, None, storage, kept=kept)
    with mock.patch.object(storage, "write_file", side_effect=lambda *_: (begun.set(), goes_on.wait(60))):
        saver.persist(saver.take(0, 5, share(state), OPERATORS))
        begun.wait(60)
        saver.close()
        assert kept.take(0, None) is None
        goes_on.set()


def test_buffers_are_kept_without_memory_tier(storage, kept, no_new_buffer):
    state = state_of(6, 2)
    Saver(0, CPU, None, storage, kept=kept).close()
    before = Saver(0, CPU, None, storage, kept=kept)
    before.reserve(0, share(state).layout.nbytes)
    before.close()
    with no_new_buffer:
        Saver(0, CPU, None, storage, kept=kept).reserve(0, share(state).layout.nbytes)


def test_smallest_fitting_buffer_is_used(tmp_path, kept):
    kept.keep(HostBuffer(nbytes, tmp_path / str(nbytes)) for nbytes in (4096, 8192, 1024))
    assert kept.take(1, tmp_path / "elsewhere") is None and kept.take(1, None) is None
    taken = kept.take(2000, tmp_path)
    assert taken is not None and taken.nbytes == 4096
    assert kept.take(9000, tmp_path) is None
    assert [path.name for path in kept.paths] == ["1024"] and not (tmp_path / "8192").exists()
    kept.trim(0)
    assert not (tmp_path / "1024").exists()


def test_only_names_left_by_dead_processes_are_removed(memory, kept):
    state, slots = state_of(6, 2), memory.storage.root / "slots"
    Saver(1, CPU, memory, None, kept=KeptBuffers()).reserve(0, share(state).layout.nbytes)  # alive, of another rank
    Saver(7, CPU, memory, None).reserve(0, share(state).layout.nbytes)  # not on this node any more
    Saver(0, CPU, memory, None).reserve(0, share(state).layout.nbytes)  # this rank's dead process
    before = Saver(0, CPU, memory, None, kept=kept)
    before.reserve(0, share(state).layout.nbytes)
    (mine,) = {path.name for path in slots.iterdir()} & {"rank_00000.0"}  # the dead one's name is taken over
    before.close()
    (slots / "rank_00000.5").touch()
    after = Saver(0, CPU, memory, None, kept=kept)
    after.remove_leftovers(False, (0, 1))
    assert {path.name for path in slots.iterdir()} == {mine, "rank_00001.0", "rank_00007.0"}
    after.remove_leftovers(True, (0, 1))
    assert {path.name for path in slots.iterdir()} == {mine, "rank_00001.0"}


def test_interrupted_session_passes_on_its_buffers(tmp_path):
    remains, parts = LocalRemains(), SimpleNamespace()
    remains.buffers.keep([HostBuffer(4096, tmp_path / "slot")])
    session = Session(*[cast(Any, parts)] * 3, remains)
    session.interrupt()
    assert remains.buffers.paths == {tmp_path / "slot"}
    session.close()
    assert not remains.buffers.paths and not (tmp_path / "slot").exists()


def test_new_rank_leaves_old_file_names_to_its_new_worker(memory, kept):
    state, slots = state_of(6, 2), memory.storage.root / "slots"
    expected = values(state)
    before = Saver(0, CPU, memory, None, kept=kept)
    before.reserve(1, share(state).layout.nbytes)
    part = before.take(0, 7, share(state), OPERATORS).finalized.result()
    before.close()
    after, other = Saver(3, CPU, memory, None, kept=kept), Saver(0, CPU, memory, None, kept=KeptBuffers())
    assert not kept.paths and not [*slots.iterdir()]
    for saver in (after, other):
        saver.reserve(0, share(state).layout.nbytes)
        saver.remove_leftovers(True, (0, 3))
    assert {path.name for path in slots.iterdir()} == {"rank_00000.0", "rank_00003.0"}
    assert_holds(memory.storage.root / "iter_0000007" / part.name, part, state, expected)
