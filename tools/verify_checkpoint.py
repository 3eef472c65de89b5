#!/usr/bin/env python3
"""Tells whether checkpoints are whole: every byte of every file, and every element of the optimizer state."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import xxhash
from _checkpoint import OPTIMIZER, Checkpoint, choose, files, human, is_checkpoint, read_checkpoint, read_optimizer
from _coverage import coverage_problems

_BLOCK = 1 << 22

EPILOG = """\
examples:
  python tools/verify_checkpoint.py checkpoints
  python tools/verify_checkpoint.py checkpoints --all --workers 16
  python tools/verify_checkpoint.py checkpoints/iter_0000100 --json

Of a --save directory, the checkpoint that its tracker names is verified, and that the tracker is right.

exit codes: 0 all is whole, 1 something is damaged or missing (one line for each problem), 2 the command line."""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Verify checkpoints: files, sizes, hashes, and that no element of optimizer state is missing.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a --save directory, or one iter_* in it")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--iteration", type=int, metavar="N", help="the checkpoint of iteration N, not the tracker's")
    which.add_argument("--all", action="store_true", help="all checkpoints of a --save directory")
    parser.add_argument(
        "--workers",
        type=int,
        default=min(8, os.cpu_count() or 1),
        metavar="N",
        help="threads that read and hash (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


@dataclass
class Verdict:
    """What was found out about a checkpoint, or about a --save directory as such."""

    path: Path
    checkpoint: Checkpoint | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    hashed: int = 0
    """Bytes that were read and hashed."""
    tensors: int = 0
    """Tensors with optimizer state."""

    def to_dict(self) -> dict:
        """For JSON."""
        iteration = self.checkpoint.state.get("iteration") if self.checkpoint else None
        return {
            "path": str(self.path),
            "iteration": iteration,
            "whole": not self.problems,
            "files": len(self.checkpoint.files) if self.checkpoint else 0,
            "bytes": self.hashed,
            "tensors": self.tensors,
            "problems": self.problems,
            "notes": self.notes,
        }

    def lines(self) -> list[str]:
        """For people."""
        found = [f"  {problem}" for problem in self.problems] + [f"  note: {note}" for note in self.notes]
        count = len(self.problems)
        if count:
            return [f"{self.path}: NOT WHOLE, {count} problem{'s' if count > 1 else ''}", *found]
        if not self.checkpoint:
            return [f"{self.path}:", *found] if found else []
        kept = f"optimizer state of {self.tensors:,} tensors" if self.tensors else "no optimizer state"
        return [f"{self.path}: whole, {len(self.checkpoint.files)} files, {human(self.hashed)}, {kept}", *found]


def main(argv: list[str] | None = None) -> int:
    """Runs the tool.

    Args:
        argv: The command line, by default the process's own.

    Returns:
        The exit status: 0 where all is whole, 1 where something is not.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.workers < 1:
        parser.error("--workers must be at least 1")
    for path in args.paths:
        if not path.is_dir():
            parser.error(f"{path} is not a directory")
        if is_checkpoint(path) and (args.all or args.iteration is not None):
            parser.error(f"{path} is one checkpoint: give the directory that it is in, or drop --all and --iteration")
    verdicts = [verdict for path in args.paths for verdict in examine(path, args.iteration, args.all)]
    started = time.perf_counter()
    check_hashes(verdicts, args.workers)
    seconds = time.perf_counter() - started
    for verdict in verdicts:
        check_optimizer(verdict)
    _print(verdicts, seconds, args.json)
    return int(any(verdict.problems for verdict in verdicts))


def _print(verdicts: list[Verdict], seconds: float, as_json: bool) -> None:
    size = sum(verdict.hashed for verdict in verdicts)
    speed = size / 1e9 / seconds
    if as_json:
        facts = {"whole": not any(v.problems for v in verdicts), "bytes": size, "seconds": seconds}
        facts |= {"gb_per_second": speed, "verified": [verdict.to_dict() for verdict in verdicts]}
        print(json.dumps(facts, indent=2))
        return
    for line in (line for verdict in verdicts for line in verdict.lines()):
        print(line)
    print(f"hashed {human(size)} in {seconds:.2f} s, {speed:.2f} GB/s")


def examine(path: Path, iteration: int | None, every: bool) -> list[Verdict]:
    """What can be told of a PATH without reading much: a verdict for each checkpoint, and one for their directory.

    Args:
        path: The PATH.
        iteration: Only the checkpoint of this iteration.
        every: All checkpoints of a --save directory.
    """
    if is_checkpoint(path):
        return [_opened(path)]
    directory = Verdict(path, notes=leftovers(path))
    try:
        chosen = [choose(path, iteration)]
    except files.CheckpointError as error:
        directory.problems.append(str(error).removeprefix(f"{path}: "))
        chosen = []
    if iteration is None and (problem := tracker_problem(path)):
        directory.problems.append(problem)
    if every:
        chosen = [files.directory_of(path, i) for i in files.saved_iterations(path)]
    return [directory, *map(_opened, chosen)]


def _opened(directory: Path) -> Verdict:
    verdict = Verdict(directory)
    try:
        verdict.checkpoint = read_checkpoint(directory)
        verdict.problems += verdict.checkpoint.problems
    except files.CheckpointError as error:
        verdict.problems.append(str(error).removeprefix(f"{directory}/"))
    return verdict


def tracker_problem(root: Path) -> str | None:
    """What is wrong with the tracker file of a --save directory, if anything is."""
    saved = files.saved_iterations(root)
    try:
        tracked = files.latest_iteration(root)
    except (files.CheckpointError, ValueError, OSError):
        return f"{files.TRACKER}: does not hold an iteration"
    if tracked is None:
        return f"{files.TRACKER}: is missing, so --load finds nothing" if saved else None
    if tracked not in saved:
        return f"{files.TRACKER}: names iteration {tracked}, which is not there"
    return None


def leftovers(root: Path) -> list[str]:
    """What a save that was killed, or still goes on, has left in a --save directory; all of it is harmless."""
    notes = [
        f"{path.name}: a save that has not ended; the next one clears it" for path in root.glob(".iter_*.incomplete")
    ]
    for path in root.glob(".iter_*.replaced"):
        notes.append(f"{path.name}: was to be replaced; the next start with --save here brings it back or clears it")
    if tracker_problem(root) is None and (saved := files.saved_iterations(root)):
        tracked = files.latest_iteration(root)
        if tracked != saved[-1]:
            notes.append(f"{files.TRACKER}: names iteration {tracked}; --ckpt-step {saved[-1]} loads the newest")
    return sorted(notes)


def check_hashes(verdicts: list[Verdict], workers: int) -> None:
    """Compares every file that has its listed size with its listed hash.

    Args:
        verdicts: Those of all checkpoints; they get the problems.
        workers: Number of threads.
    """
    jobs = [(v, name) for v in verdicts if v.checkpoint for name in v.checkpoint.files.keys() - v.checkpoint.broken]
    jobs.sort(
        key=lambda job: (-job[0].checkpoint.files[job[1]]["bytes"], job[1])
    )  # large ones first: threads end alike
    total = sum(verdict.checkpoint.files[name]["bytes"] for verdict, name in jobs)
    with _progress(total) as advance, ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(lambda job: _hash_problem(job[0].checkpoint, job[1], advance), jobs))
    for (verdict, name), problem in sorted(zip(jobs, results, strict=True), key=lambda pair: pair[0][1]):
        verdict.hashed += verdict.checkpoint.files[name]["bytes"]
        if problem:
            verdict.problems.append(f"{name}: {problem}")
            verdict.checkpoint.broken.add(name)


def _hash_problem(checkpoint: Checkpoint, name: str, advance: Callable[[int], None]) -> str | None:
    hasher, block = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK))
    try:
        with open(checkpoint.directory / name, "rb", buffering=0) as file:
            while count := file.readinto(block):
                hasher.update(block[:count])
                advance(count)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if hasher.hexdigest() != checkpoint.files[name]["xxh3_128"]:
        return "does not match its hash: its content is damaged"
    return None


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Shows a bar on a terminal; yields what moves it on."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.advance(task, count)


def check_optimizer(verdict: Verdict) -> None:
    """Checks that the files hold every element of the optimizer state exactly once.

    Args:
        verdict: That of a checkpoint; it gets the problems.
    """
    checkpoint = verdict.checkpoint
    if not checkpoint:
        return
    boxes, problems = read_optimizer(checkpoint)
    verdict.problems += problems
    verdict.tensors = len({box.name for box in boxes})
    if checkpoint.broken.isdisjoint(checkpoint.optimizer_files):
        verdict.problems += coverage_problems(boxes, {} if files.STATE in checkpoint.broken else checkpoint.state)
    else:  # each tensor in a lost file would be a problem of its own
        verdict.notes.append(f"{OPTIMIZER}/: not searched for holes and overlaps, since files of it are lost")


if __name__ == "__main__":
    sys.exit(main())
