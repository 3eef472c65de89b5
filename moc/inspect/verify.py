"""Verifies that checkpoints are complete: every byte of every file, and every element of their state."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from moc.cli_output import Parser, escapes_output, human, print_json, print_lines, progress
from moc.errors import cause_of, with_code
from moc.files.safe_directory import SafeDirectory
from moc.inspect.checkpoint import (
    DENSE,
    SNAPSHOT,
    Checkpoint,
    committed_iterations,
    format_of,
    is_checkpoint,
    is_uncommitted,
    read_all_boxes,
    read_checkpoint,
    read_file_boxes,
    select_checkpoint,
)
from moc.inspect.coverage import coverage_problems
from moc.inspect.older_versions import chain_problems
from moc.store import dense_files
from moc.store.errors import CheckpointError
from moc.store.manifest import compute_file_digest

EPILOG = """\
examples:
  python tools/verify_checkpoint.py checkpoints
  python tools/verify_checkpoint.py checkpoints --all --workers 16
  python tools/verify_checkpoint.py checkpoints/iter_0000100 --json

Checkpoints are dense (written by --save) or in Format v1 (written by a policy; docs/reference/format.md).  In a
--save directory, the tracker and the checkpoint that it names are verified; in other directories the newest.

exit codes: 0 no problem, 1 something is damaged or missing (one line for each problem), 2 the command line."""


def build_parser() -> Parser:
    """Builds the command line parser."""
    parser = Parser(
        description="Verify checkpoints: files, sizes, hashes, and that no element of the state is missing.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH", help="a directory of checkpoints, or one iter_* in it"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--iteration", type=int, metavar="N", help="the checkpoint of iteration N, not the tracker's")
    which.add_argument("--all", action="store_true", help="all checkpoints of a directory")
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
    """Findings on a checkpoint, or on a --save directory itself."""

    path: Path
    checkpoint: Checkpoint | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    hashed_bytes: int = 0
    """Bytes read and hashed."""
    tensors: int = 0
    """Tensors in region files: with optimizer state, and in Format v1 all."""

    def to_dict(self) -> dict:
        """Returns the verdict, for JSON."""
        return {
            "path": str(self.path),
            "format": self.checkpoint.format if self.checkpoint else None,
            "iteration": self.checkpoint.iteration if self.checkpoint else None,
            "whole": not self.problems,
            "files": len(self.checkpoint.files) if self.checkpoint else 0,
            "bytes": self.hashed_bytes,
            "tensors": self.tensors,
            "problems": self.problems,
            "notes": self.notes,
        }

    def lines(self) -> list[str]:
        """Returns the verdict, as text."""
        details = [f"  {problem}" for problem in self.problems] + [f"  note: {note}" for note in self.notes]
        count = len(self.problems)
        if count:
            damage = CheckpointError(
                f"{self.path}: NOT WHOLE, {count} problem{'s' if count > 1 else ''}. Fix: use another checkpoint, or "
                "restore the files from a copy",
                code="checkpoint-not-whole",
            )
            return [with_code(damage), *details]
        if not self.checkpoint:
            return [f"{self.path}:", *details] if details else []
        state_kind = "optimizer state" if self.checkpoint.format == DENSE else "state"
        state_text = f"{state_kind} of {self.tensors:,} tensors" if self.tensors else f"no {state_kind}"
        return [
            f"{self.path}: whole, {len(self.checkpoint.files)} files, {human(self.hashed_bytes)}, {state_text}",
            *details,
        ]


@escapes_output
def main(argv: list[str] | None = None) -> int:
    """Runs the tool; returns the exit status: 0 if all checkpoints are complete, otherwise 1."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.workers < 1:
        parser.error("--workers is less than 1. Fix: pass 1 or more", code="value-out-of-range")
    for path in args.paths:
        if not path.is_dir():
            parser.error(
                f"{path} is not a directory. Fix: pass a directory with checkpoints, or one checkpoint",
                code="not-a-directory",
            )
        if is_checkpoint(path) and (args.all or args.iteration is not None):
            parser.error(
                f"{path} is one checkpoint, so --all and --iteration have no effect. Fix: give the directory "
                "that it is in, or drop --all and --iteration",
                code="directory-is-one-checkpoint",
            )
    verdicts = [verdict for path in args.paths for verdict in open_verdicts(path, args.iteration, args.all)]
    started = time.perf_counter()
    check_hashes(verdicts, args.workers)
    seconds = time.perf_counter() - started
    for verdict in verdicts:
        check_coverage(verdict)
    _print(verdicts, seconds, args.json)
    return int(any(verdict.problems for verdict in verdicts))


def _print(verdicts: list[Verdict], seconds: float, as_json: bool) -> None:
    size = sum(verdict.hashed_bytes for verdict in verdicts)
    speed = size / 1e9 / seconds
    if as_json:
        facts = {"whole": not any(v.problems for v in verdicts), "bytes": size, "seconds": seconds}
        facts |= {"gb_per_second": speed, "verified": [verdict.to_dict() for verdict in verdicts]}
        print_json(facts)
        return
    print_lines(*(line for verdict in verdicts for line in verdict.lines()))
    print_lines(f"hashed {human(size)} in {seconds:.2f} s, {speed:.2f} GB/s")


def open_verdicts(path: Path, iteration: int | None, all_iterations: bool) -> list[Verdict]:
    """Examines a PATH without reading much; returns a verdict for each checkpoint, and one for their directory."""
    if is_checkpoint(path):
        return [_open_verdict(path)]
    directory = Verdict(path, notes=leftover_notes(path))
    try:
        directories = [select_checkpoint(path, iteration)]
    except CheckpointError as error:
        directory.problems.append(cause_of(error).removeprefix(f"{path}: "))
        directories = []
    if iteration is None and (problem := tracker_problem(path)):
        directory.problems.append(problem)
    if all_iterations:
        directories = [dense_files.checkpoint_path(path, i) for i in committed_iterations(path)]
    return [directory, *map(_open_verdict, directories)]


def _open_verdict(directory: Path) -> Verdict:
    verdict = Verdict(directory)
    try:
        verdict.checkpoint = read_checkpoint(directory)
        verdict.problems += verdict.checkpoint.problems
    except CheckpointError as error:
        verdict.problems.append(cause_of(error).removeprefix(f"{directory}/"))
    return verdict


def tracker_problem(root: Path) -> str | None:
    """Returns the problem with the tracker file of a --save directory, or None; Format v1 has no tracker."""
    saved = committed_iterations(root)
    try:
        tracked = dense_files.latest_iteration(root)
    except (CheckpointError, ValueError, OSError):
        return f"{dense_files.TRACKER_FILE}: does not hold an iteration"
    if tracked is None:
        written = any(format_of(dense_files.checkpoint_path(root, iteration)) == DENSE for iteration in saved)
        return f"{dense_files.TRACKER_FILE}: is missing, so Megatron-LM loads nothing" if written else None
    if tracked not in saved:
        return f"{dense_files.TRACKER_FILE}: names iteration {tracked}, which is not there"
    return None


def leftover_notes(root: Path) -> list[str]:
    """Returns notes on remains of killed or unfinished saves in a directory; all are harmless."""
    uncommitted = [dense_files.checkpoint_path(root, iteration) for iteration in dense_files.list_iterations(root)]
    unfinished = [*root.glob(".iter_*.incomplete"), *filter(is_uncommitted, uncommitted)]
    notes = [f"{path.name}: a save that has not ended; the next one clears it" for path in unfinished]
    for path in root.glob(".iter_*.replaced"):
        notes.append(f"{path.name}: was to be replaced; the next start with --save here brings it back or clears it")
    if tracker_problem(root) is None and (saved := committed_iterations(root)):
        tracked = dense_files.latest_iteration(root)
        if tracked is not None and tracked != saved[-1]:
            notes.append(
                f"{dense_files.TRACKER_FILE}: names iteration {tracked}; --ckpt-step {saved[-1]} loads the newest"
            )
    return sorted(notes)


def check_hashes(verdicts: list[Verdict], workers: int) -> None:
    """Compares every file of the listed size with its hash or hashes, in several threads; adds the problems."""
    checkpoints = [(verdict, verdict.checkpoint) for verdict in verdicts if verdict.checkpoint]
    jobs = [
        (verdict, checkpoint, name)
        for verdict, checkpoint in checkpoints
        for name in checkpoint.files.keys() - checkpoint.damaged_files
    ]
    jobs.sort(key=lambda job: (-job[1].files[job[2]]["bytes"], job[2]))  # large files first, to balance the threads
    total = sum(checkpoint.files[name]["bytes"] for _, checkpoint, name in jobs)
    with progress(total) as on_progress, ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(lambda job: _hash_problems(job[1], job[2], on_progress), jobs))
    for (verdict, checkpoint, name), problems in sorted(zip(jobs, results, strict=True), key=lambda pair: pair[0][2]):
        verdict.hashed_bytes += checkpoint.files[name]["bytes"]
        if problems:  # replace earlier problems with the file's content
            other_problems = [problem for problem in verdict.problems if not problem.startswith(f"{name}: ")]
            verdict.problems = [*other_problems, *(f"{name}: {problem}" for problem in problems)]
            checkpoint.damaged_files.add(name)


def _hash_problems(checkpoint: Checkpoint, name: str, advance: Callable[[int], None]) -> list[str]:
    entry = checkpoint.files[name]
    try:
        with open(SafeDirectory(checkpoint.directory).open(name), "rb", buffering=0) as file:
            if checkpoint.format == SNAPSHOT:
                return _snapshot_problems(checkpoint, name, file, advance)
            if compute_file_digest(file, entry["bytes"], advance) != entry["xxh3_128"]:
                return ["does not match its hash: its content is damaged"]
    except OSError as error:
        return [f"cannot be read ({error.strerror})"]
    return []


def _snapshot_problems(checkpoint: Checkpoint, name: str, file, advance: Callable[[int], None]) -> list[str]:
    """Checks a file of Format v1: the manifest has the header's hash, and the header the hashes of all boxes."""
    entry = checkpoint.files[name]
    if compute_file_digest(file, entry["header_bytes"], advance) != entry["header_xxh3_128"]:
        return ["its header does not match its hash: it is damaged"]
    try:
        boxes = read_file_boxes(checkpoint.directory, name)
    except CheckpointError as error:
        return [cause_of(error).removeprefix(f"{name}: ")]
    problems = []
    for box in sorted(boxes, key=lambda box: box.start):
        file.seek(box.start)
        if compute_file_digest(file, box.nbytes, advance) != box.digest:
            offset = list(box.region.offset)
            problems.append(f"{box.slot} of {box.name} at {offset} does not match its hash: it is damaged")
    return problems


def check_coverage(verdict: Verdict) -> None:
    """Checks that files hold every element of the state once, and the bases of gradients; adds the problems."""
    checkpoint = verdict.checkpoint
    if not checkpoint:
        return
    verdict.problems += chain_problems(checkpoint)
    boxes, problems = read_all_boxes(checkpoint)
    verdict.problems += [problem for problem in problems if problem not in verdict.problems]
    verdict.tensors = len({box.name for box in boxes})
    if checkpoint.damaged_files.isdisjoint(checkpoint.shard_files):
        if dense_files.STATE_FILE in checkpoint.damaged_files:
            checkpoint.state = {}
        verdict.problems += coverage_problems(checkpoint, boxes)
    else:  # each tensor in a lost file would be another problem
        verdict.notes.append("not searched for holes and overlaps, since files are lost")
