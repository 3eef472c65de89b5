"""What workers do in tests of snapshots, beside training: they are slow, or die at the worst of moments."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from moc.files import safe_directory
from moc.session.saving import pipeline
from moc.snapshot import device_copy
from moc.store import storage
from moc.store.shard_file import FileLayout
from moc.store.store import Store
from tests.integration import bodies
from tests.integration.flipping_user_pretrain import flipped_before_saves


def train_slowly(flags: dict, write_s: float) -> dict:
    """As ``bodies.train``; on the last worker so much time passes before each file of a snapshot in storage."""
    write = safe_directory.SafeDirectory.write

    def slowly(self, *args, **how) -> None:
        if str(self.root).startswith(flags["ckpt_dir"]):
            time.sleep(write_s)
        write(self, *args, **how)

    if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        safe_directory.SafeDirectory.write = slowly
    return bodies.train(flags)


def train_with_slow_names(flags: dict, sync_s: float) -> dict:
    """As ``bodies.train``; each sync of a directory takes so much longer.

    Returns:
        The same, and ``unpublished``: by iteration, snapshots that this run has begun and storage has no manifest of,
        and how many directories of snapshots storage has.
    """
    sync, take, seen = os.fsync, pipeline.SavingPipeline.begin_if_planned, []
    begun, store = set(), Store(storage.LocalStorage(flags["ckpt_dir"]))

    def slowly(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            time.sleep(sync_s)
        sync(descriptor)

    def watched(self, position, record) -> None:
        take(self, position, record)
        begun.add(self.storage.newest_started)
        published = set(store.iterations())
        newest = max(published, default=0)
        seen.append((sum(one > newest for one in begun), len(list(Path(flags["ckpt_dir"]).glob("iter_*")))))

    os.fsync, pipeline.SavingPipeline.begin_if_planned = slowly, watched
    return bodies.train(flags) | {"unpublished": seen}


def train_beside_fast_storage(flags: dict) -> dict:
    """As ``bodies.train``; a snapshot is in storage, if it goes there, before the next iteration begins."""
    take = pipeline.SavingPipeline.begin_if_planned

    def patiently(self, position, record) -> None:
        take(self, position, record)
        while self._stages.to_storage:
            self._all_reduce(for_storage=True)

    pipeline.SavingPipeline.begin_if_planned = patiently
    return bodies.train(flags)


def train_with_copies_that_wait(flags: dict, copy_s: float) -> dict:
    """As ``bodies.train``; copies begin only when training waits for them, or after 100 seconds, and take so long."""
    copy, begin, waited = device_copy._copy_all, device_copy.ThreadCapturer.start, threading.Event()

    def waiting(method: Callable) -> Callable:
        def call(*args, **how):
            if threading.current_thread() is threading.main_thread():
                waited.set()
            return method(*args, **how)

        return call

    device_copy.ThreadCapturer.start = lambda *args: (waited.clear(), begin(*args))[1]
    device_copy._copy_all = lambda *args, **how: (waited.wait(100), time.sleep(copy_s), copy(*args, **how))[2]
    for kind in (device_copy._ThreadCapture, device_copy._HostCapture):
        kind.wait = waiting(kind.wait)
    pipeline.SavingPipeline._all_reduce = waiting(pipeline.SavingPipeline._all_reduce)
    return bodies.train(flags)


def train_while_clocks_run_backwards(flags: dict) -> dict:
    """As ``bodies.train``; each look at the clock shows an hour less."""
    now, looks = time.time, itertools.count()
    time.time = lambda: now() - 3600.0 * next(looks)
    return bodies.train(flags)


def train_impatiently(flags: dict) -> dict:
    """As ``bodies.train``, without waiting for a job that may still be dying."""
    storage.LocalStorage.__init__.__defaults__ = (0.2, False, None)
    return bodies.train(flags)


def train_dying(flags: dict, rank: int, die_at: int | str | None) -> list[str]:
    """As ``bodies.train``; a worker is killed right before one of its calls that change files or snapshot memory.

    Args:
        flags: the flags.
        rank: which worker.
        die_at: before which of these calls, counted from 0, or by its name; None for none.

    Returns:
        The names of the calls: what is called, and by which functions.
    """
    calls = _Calls(die_at if os.environ["RANK"] == str(rank) else None)
    _watch_files(calls, (flags["ckpt_dir"], flags.get("ckpt_memory_dir", flags["ckpt_dir"])))
    _watch_memory(calls)
    bodies.train(flags)
    return calls.seen


class _Calls:
    """Notes calls, and kills this process at one of them."""

    def __init__(self, die_at: int | str | None):
        self.seen: list[str] = []
        self._die_at, self._lock = die_at, threading.Lock()

    def note(self, name: str, last_act: Callable = lambda: None) -> None:
        """To be called before ``name`` is; ``last_act`` is what is done before dying here."""
        call = " < ".join([name, *_callers(3)])
        with self._lock:
            if self._die_at in (call, len(self.seen)):
                last_act()
                os.kill(os.getpid(), signal.SIGKILL)
            self.seen.append(call)


def _callers(count: int) -> list[str]:
    """The innermost functions of ours that are being called here."""
    found, frame = [], sys._getframe(1)
    while frame is not None and len(found) < count:
        if frame.f_globals.get("__name__", "").startswith("moc."):
            found.append(frame.f_code.co_name)
        frame = frame.f_back
    return found


def _watch_files(calls: _Calls, roots: tuple[str, ...]) -> None:
    def concerned(args, kwargs) -> bool:
        """Whether a call is about snapshots; most name files by a descriptor of their directory."""
        by_descriptor = any(name.endswith("dir_fd") for name in kwargs)
        return isinstance(args[0], int) or by_descriptor or os.fspath(args[0]).startswith(roots)

    def watched(name: str, function: Callable) -> Callable:
        def call(*args, **kwargs):
            if concerned(args, kwargs):
                calls.note(name)
            return function(*args, **kwargs)

        return call

    for name in ("rename", "link", "unlink", "rmdir", "mkdir", "fsync", "posix_fallocate"):
        setattr(os, name, watched(name, getattr(os, name)))

    write = safe_directory._write_all

    def watched_write(file: int, data: memoryview) -> None:
        if data.nbytes:
            calls.note("write")
            calls.note("write half", lambda: write(file, data[: data.nbytes // 2]))
        write(file, data)

    safe_directory._write_all = watched_write


def _watch_memory(calls: _Calls) -> None:
    copy, header = device_copy._copy_all, FileLayout.header

    def watched_copy(copies, **how) -> None:
        middle = len(copies) // 2
        calls.note("copies")
        copy(copies[:middle], **how)
        calls.note("copies half")
        copy(copies[middle:], **how)

    def watched_header(layout, digests) -> bytes:
        if digests and any(digest.strip("0") for digest in digests):  # not while sizes are worked out
            calls.note("header")
        return header(layout, digests)

    device_copy._copy_all, FileLayout.header = watched_copy, watched_header


def train_in_bucket(flags: dict, bucket: str, environment: dict) -> dict:
    """As ``bodies.train``, with a client's environment for object storage; the bucket is made if need be."""
    os.environ.update(environment)
    import s3fs

    with contextlib.suppress(FileExistsError):
        s3fs.S3FileSystem().mkdir(bucket)
    return bodies.train(flags)


def train_and_flip(flags: dict, drawn: str | int) -> str:
    """Trains; rank 0 changes one bit of the state between its digest and its dense checkpoint.

    Args:
        flags: of the run.
        drawn: as for ``flipped_before_saves``.

    Returns:
        The operator that has changed; empty on other ranks.
    """
    with flipped_before_saves(drawn) as changed:
        bodies.train(flags)
    return "".join(changed)
