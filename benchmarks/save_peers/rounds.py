"""Measures a way of saving beside training, in one of the workers that train; knows no model.

A worker runs iterations without saves, then rounds: a save, ``every`` iterations, and the wait for the save to be
complete, as the next save would wait.  The first round pays for what is set up once, and is kept apart.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

Span = tuple[float, float]
WARM_UP = 2  # iterations
KEPT = 2  # complete checkpoints, as ours keeps


class Saver(Protocol):
    """One way of saving.  All methods are called on all workers alike.

    Whatever keeps training waiting outside of these methods is put into the :class:`Clock` that the saver was made
    with.
    """

    def begin(self, directory: Path) -> None:
        """Saves into an empty directory, or starts to; returns when training may go on."""

    def poll(self) -> None:
        """Called after each iteration; by default there is nothing to do."""

    def finish(self) -> float:
        """Waits until the checkpoint is complete; when it was, in seconds of ``time.perf_counter``."""
        ...


@dataclass
class Clock:
    """When this worker stood still, in seconds of ``time.perf_counter``, which all processes of a machine share."""

    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def still(self):
        """Training stands still meanwhile."""
        start = time.perf_counter()
        yield
        self.spans.append((start, time.perf_counter()))


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    directory: Path  # where to save
    saves: int  # rounds that count
    every: int  # iterations between saves
    plain: int  # iterations without saves


def arguments(description: str | None, modes: tuple[str, ...]) -> tuple[argparse.Namespace, list[str]]:
    """A peer's own flags, a :class:`Plan` among them, and all others."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--mode", choices=modes, required=True)
    parser.add_argument("--directory", type=Path, required=True, help="an empty directory to save in")
    parser.add_argument("--result", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--saves", type=int, required=True, help="saves that count")
    parser.add_argument("--every", type=int, required=True, help="iterations between saves")
    parser.add_argument("--plain", type=int, required=True, help="iterations without saves")
    return parser.parse_known_args()


def measure(saver: Saver, clock: Clock, iterate: Callable[[], object], plan: Plan | argparse.Namespace) -> dict:
    """Runs all rounds of a plan, or of flags that describe one; a collective call.

    Returns:
        ``plain_s``, seconds of each iteration without saves; ``first`` and ``rounds``, of each save: ``stall_s``
        (training stood still), ``round_s`` (the save, ``every`` iterations, and the wait until it was complete),
        ``complete_s`` (from its beginning until the checkpoint was complete), ``unsynced_s`` (what an fsync of its
        files then took), ``bytes`` on disk.
    """
    for _ in range(WARM_UP):
        iterate()
    plain = [timed(iterate) for _ in range(plan.plain)]
    rounds = [_round(saver, clock, iterate, plan, i) for i in range(plan.saves + 1)]
    return {"plain_s": plain, "first": rounds[0], "rounds": rounds[1:]}


def _round(saver: Saver, clock: Clock, iterate: Callable[[], object], plan, number: int) -> dict:
    directory = plan.directory / f"save_{number}"
    if dist.get_rank() == 0:
        directory.mkdir(parents=True)
    clock.spans.clear()
    dist.barrier()
    begun = time.perf_counter()
    with clock.still():
        saver.begin(directory)
    for _ in range(plan.every):
        iterate()
        with clock.still():
            saver.poll()
    with clock.still():
        complete = saver.finish()
    dist.barrier()
    seconds = time.perf_counter() - begun
    workers = gather((clock.spans, complete))
    result = {
        "stall_s": stall([spans for spans, _ in workers]),
        "round_s": max(gather(seconds)),
        "complete_s": max(complete for _, complete in workers) - begun,
        **_settle(directory, plan.directory / f"save_{number - KEPT}"),
    }
    dist.barrier()
    return result


def stall(workers: list[list[Span]]) -> float:
    """Seconds that a job stood still, from the spans of its workers, which all have the same number of them.

    A span counts from when the last worker has come: until then the early ones do not wait for the save.
    """
    moments = zip(*workers, strict=True)
    return sum(max(end for _, end in spans) - max(start for start, _ in spans) for spans in moments)


def timed(iterate: Callable[[], object], iterations: int = 1) -> float:
    """Seconds per iteration, from when all workers are ready until all are done."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    dist.barrier()
    synchronize()
    start = time.perf_counter()
    for _ in range(iterations):
        iterate()
    synchronize()
    dist.barrier()
    return (time.perf_counter() - start) / iterations


def forget(path: Path) -> None:
    """Takes a file out of the page cache, once it is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def gather(value) -> list:
    """The value of every worker."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def write_result(path: Path, result: dict) -> None:
    """Writes the measurements, on the first worker, and leaves the job."""
    if dist.get_rank() == 0:
        path.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _settle(directory: Path, oldest: Path) -> dict:
    """Brings a checkpoint to the disk, where nothing else is then written, and removes the oldest one."""
    if dist.get_rank() != 0:
        return {}
    files = [path for path in directory.rglob("*") if path.is_file()]
    size, start = sum(path.stat().st_size for path in files), time.perf_counter()
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    unsynced = time.perf_counter() - start
    shutil.rmtree(oldest, ignore_errors=True)
    return {"unsynced_s": unsynced, "bytes": size}
