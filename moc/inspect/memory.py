"""Lists memory that jobs have left on this machine (/dev/shm), and removes named parts that no process uses.

A killed job leaves its snapshots there to resume from them.  If it is not restarted, they only use memory.  Memory of a
job that was alive within its lease (mocrun --silence-timeout) is kept, because the job may be replacing its workers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from moc.cli_output import Parser, escapes_output, print_lines, refused
from moc.store.errors import CheckpointError
from moc.store.host_memory import Leftover, leftovers, leftovers_of, remove_leftover


@escapes_output
def main(argv: list[str] | None = None) -> int:
    """Runs the tool; returns the exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="*", type=Path, help="only these directories, as the list shows them")
    parser.add_argument("--ckpt-dir", help="only the run whose checkpoints are in this directory or URL")
    parser.add_argument("--all", action="store_true", help="all jobs of this user, including jobs that wait to resume")
    parser.add_argument("--remove", action="store_true", help="remove what a path, --ckpt-dir or --all names")
    parser.add_argument(
        "--ended", action="store_true", help="the jobs have ended: do not keep what a job used within its lease"
    )
    parser.add_argument("--memory-dir", default="/dev/shm", help="the memory file system (default: %(default)s)")
    args = parser.parse_args(argv)
    named = bool(args.path) + (args.ckpt_dir is not None) + args.all
    if named > 1 or (args.remove and not named):
        parser.error(
            "--remove needs the paths of directories, --ckpt-dir or --all. Fix: add paths, --ckpt-dir DIR for one "
            "run, or --all for all jobs",
            code="flag-needs-another",
        )
    try:
        leftover_memory = (
            leftovers(args.memory_dir) if args.ckpt_dir is None else leftovers_of(args.memory_dir, args.ckpt_dir)
        )
        leftover_paths = {leftover.path.absolute() for leftover in leftover_memory}
        if unknown := {path.absolute() for path in args.path} - leftover_paths:
            raise CheckpointError(
                f"{min(unknown)} is no memory of a job. Fix: name directories as the list shows them",
                code="memory-of-no-run",
            )
        selected = [
            leftover
            for leftover in leftover_memory
            if not args.path or leftover.path.absolute() in map(Path.absolute, args.path)
        ]
        if args.remove and not selected:
            owner = "of a job" if args.ckpt_dir is None else f"of the run in {args.ckpt_dir}"
            print_lines(f"nothing is removed: {args.memory_dir} has no memory {owner}")
        elif args.remove:
            removed = [_remove(leftover, args.ended) for leftover in selected]  # a list: also after a failure
            return int(not all(removed))
        else:
            total = f"{len(selected)} directories, {sum(leftover.bytes for leftover in selected) / 1e9:.3g} GB"
            print_lines(*map(_line, selected), total)
        return 0
    except (CheckpointError, OSError) as error:
        return refused("clean_memory", error)


def _remove(leftover: Leftover, ended: bool) -> bool:
    try:
        remove_leftover(leftover, ended)
    except (CheckpointError, OSError) as error:
        refused("clean_memory", error)
        return False
    print_lines(f"removed  {_line(leftover)}")
    return True


def _line(leftover: Leftover) -> str:
    newest = "no snapshot" if leftover.newest is None else f"iteration {leftover.newest}"
    used = f", used by process {leftover.used_by[0]}" if leftover.used_by else ""
    owner = f"run {leftover.run} in {leftover.address}" if leftover.run else "of no run that it names"
    return f"{leftover.path}  {leftover.bytes / 1e9:.3g} GB  {newest}  {owner}{used}"
