"""Writes a checkpoint in the background, in one forked process per worker, and commits it."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron.pretraining.checkpoint.fragments import path_of
from moc.files import decode, safe_directory
from moc.files.decode import Count, Digest, Name
from moc.files.safe_directory import SafeDirectory, remove_owned, write_durably
from moc.runtime.child_processes import attach_without_gpus
from moc.store import dense_files
from moc.store.errors import CheckpointError
from moc.store.ownership import Fence
from moc.store.shard_file import BoxTensor, write_shard_file


def write_files(
    write_weights: Callable | None, staging: Path, rank: int, entries: list[BoxTensor] | None, *weights_args
) -> None:
    """Writes a worker's shard of a checkpoint to ``staging`` and describes it; runs in a forked process.

    ``write_weights`` is megatron-core's writer of this worker's weights, if it has any; ``entries`` is the optimizer
    state, None with ``--no-save-optim``.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None  # this is a forked process
    attach_without_gpus(parent.pid)
    os.register_at_fork(after_in_child=functools.partial(attach_without_gpus, os.getpid()))  # megatron-core forks again
    if write_weights is not None:
        write_weights(*weights_args)
    shard = path_of(staging, rank)
    try:
        if entries is not None:
            shard.parent.mkdir(exist_ok=True)
            write_shard_file(shard, entries)
        written = [*staging.glob(f"__{rank}_*"), *([shard] if entries is not None else [])]
        files = {str(path.relative_to(staging)): dense_files.describe_file(path) for path in written}
        write_durably(_report(staging, rank), json.dumps({"files": files}))
    except Exception as error:  # rank 0 must learn of any failure
        with contextlib.suppress(OSError):  # rank 0 treats a missing report as a failure
            remove_owned(shard)  # the report needs room
            write_durably(_report(staging, rank), json.dumps({"error": f"worker {rank}: {error}"}))


def commit(
    root: Path,
    iteration: int,
    workers: int,
    retain_interval: int | None,
    fence: Fence | None = None,
    format: str = dense_files.FORMAT,
    lineage: dense_files.Lineage | None = None,
) -> None:
    """Commits a checkpoint of the run ``lineage`` once all ``workers`` have written their shards; runs on rank 0.

    Then deletes older checkpoints whose iteration is not a multiple of ``retain_interval``, unless it is None.

    Raises:
        CheckpointError: a worker could not write, or this writer was superseded.
    """
    if fence is not None:
        fence.check()
    staging = dense_files.staging_path(root, iteration, fence.claim.tag if fence is not None else "")
    described = {}
    for rank in range(workers):
        report = _read_report(staging, rank)
        if report.error is not None:
            raise CheckpointError(
                f"the checkpoint of iteration {iteration} could not be written ({report.error}); earlier ones are "
                f"untouched. Fix: make room or repair {root}, and start again",
                code="storage-unwritable",
            )
        described |= report.files
    SafeDirectory(root).remove_entries(staging.name, (_report(staging, rank).name for rank in range(workers)))
    for path in staging.rglob("*"):
        name = str(path.relative_to(staging))
        if name not in described and path.is_file():
            described[name] = dense_files.describe_file(path)
    dense_files.publish_save(root, iteration, described, fence, retain_interval, format, lineage)


@dataclass(frozen=True)
class _Report:
    """A worker's report: the manifest entries of its files, or its error."""

    files: dict[Name, dict[Name, Count | Digest]] = field(default_factory=dict)
    error: str | None = None


def _read_report(staging: Path, rank: int) -> _Report:
    try:
        return decode.decode(
            SafeDirectory(staging).read(_report(staging, rank).name, safe_directory.MAX_MANIFEST_BYTES), _Report
        )
    except FileNotFoundError:
        return _Report(error=f"worker {rank} left no report")
    except (OSError, ValueError) as error:
        return _Report(error=f"the report of worker {rank} cannot be read: {error}")


def _report(staging: Path, rank: int) -> Path:
    return staging / f".rank_{rank:05d}.json"


@contextlib.contextmanager
def deferring_errors(owner: type, method: str) -> Iterator[list[Exception]]:
    """Collects the errors of ``owner.method``, rank 0's writer, instead of raising them during the save.

    The other workers would wait for rank 0 in a collective; this way, all workers receive the errors after it.
    """
    write, failures = getattr(owner, method), []

    def write_or_record(*args) -> None:
        try:
            write(*args)
        except (OSError, RuntimeError) as error:
            failures.append(error)

    setattr(owner, method, write_or_record)
    try:
        yield failures
    finally:
        setattr(owner, method, write)


def forget_results() -> None:
    """Empties megatron-core's result queue, so that the next save does not read results of an abandoned save."""
    results = filesystem_async._results_queue
    with contextlib.suppress(queue.Empty, OSError, EOFError):
        while results is not None:
            results.get_nowait()


def use_mortal_result_queue() -> None:
    """Gives megatron-core's writer a result queue whose server process ends with the worker.

    megatron-core's own process would be spawned (seconds of imports), and would outlive a killed worker.
    """
    if filesystem_async._results_queue is None:
        manager = SyncManager(ctx=multiprocessing.get_context("fork"))
        manager.start(initializer=functools.partial(attach_without_gpus, os.getpid()))
        results: Any = manager.Queue()
        filesystem_async._results_queue = results
        results.manager = manager  # the server ends with the manager object
