"""Measures a save method during training, in one of the training workers; independent of the model.

A worker runs iterations without saves, then rounds: a save, ``every`` iterations, and the wait until the save is
complete, as the next save would wait. The first round includes one-time setup, and is reported separately.
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

from moc.cli_output import Parser

Span = tuple[float, float]
WARM_UP = 2  # iterations
KEPT = 2  # complete checkpoints to keep, as ours does


class Saver(Protocol):
    """One save method. All workers call all methods.

    Any wait of training outside these methods must be recorded in the saver's :class:`Clock`.
    """

    def begin(self, directory: Path) -> None:
        """Saves into an empty directory, or starts to; returns when training may continue."""

    def poll(self) -> None:
        """Does work after each iteration; nothing by default."""

    def finish(self) -> float:
        """Waits until the checkpoint is complete; returns its time of completion (``time.perf_counter``)."""
        ...


@dataclass
class Clock:
    """Stalls of this worker, in seconds of ``time.perf_counter``, which is common to all processes of a machine."""

    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def still(self):
        """Records a stall for the duration of the block."""
        start = time.perf_counter()
        yield
        self.spans.append((start, time.perf_counter()))


@dataclass(frozen=True)
class Plan:
    """Size of the measurement."""

    directory: Path  # directory for checkpoints
    saves: int  # counted rounds
    every: int  # iterations between saves
    plain: int  # iterations without saves


def arguments(description: str | None, modes: tuple[str, ...]) -> tuple[argparse.Namespace, list[str]]:
    """Parses a peer's own flags, including a :class:`Plan`; returns them and all others."""
    parser = Parser(description=description)
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
        ``plain_s``: seconds of each iteration without saves; ``first`` and ``rounds``, for each save: ``stall_s``
        (stall of training), ``round_s`` (the save, ``every`` iterations, and the wait until it was complete),
        ``complete_s`` (from its start until the checkpoint was complete), ``unsynced_s`` (duration of an fsync of its
        files afterwards), ``bytes`` on disk.
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
    """Returns the stall of a job in seconds, from its workers' spans; all workers have the same number of spans.

    A span counts from the last worker's start: before that, the early workers do not wait for the save.
    """
    moments = zip(*workers, strict=True)
    return sum(max(end for _, end in spans) - max(start for start, _ in spans) for spans in moments)


def timed(iterate: Callable[[], object], iterations: int = 1) -> float:
    """Returns the seconds per iteration, from when all workers are ready until all have finished."""
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
    """Removes a file from the page cache, after it is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def gather(value) -> list:
    """Returns the values of all workers."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def write_result(path: Path, result: dict) -> None:
    """Writes the measurements on the first worker, and leaves the job."""
    if dist.get_rank() == 0:
        path.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _settle(directory: Path, oldest: Path) -> dict:
    """Syncs a checkpoint to disk, without other writes at the time, and removes the oldest one."""
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
