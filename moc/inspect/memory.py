"""Lists memory that jobs have left on this machine (/dev/shm), and removes named parts that no process uses.

A killed job leaves its snapshots there to resume from them.  If it is not restarted, they only use memory.  Memory of a
job that was alive within its lease (mocrun --silence-timeout) is kept, because the job may be replacing its workers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from moc.output import Parser, escapes_output, print_lines, refused
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
    own = parser.parse_args(argv)
    named = bool(own.path) + (own.ckpt_dir is not None) + own.all
    if named > 1 or (own.remove and not named):
        parser.error(
            "--remove needs the paths of directories, --ckpt-dir or --all. Fix: add paths, --ckpt-dir DIR for one "
            "run, or --all for all jobs",
            code="flag-needs-another",
        )
    try:
        found = leftovers(own.memory_dir) if own.ckpt_dir is None else leftovers_of(own.memory_dir, own.ckpt_dir)
        if unknown := {path.absolute() for path in own.path} - {one.path.absolute() for one in found}:
            raise CheckpointError(
                f"{min(unknown)} is no memory of a job. Fix: name directories as the list shows them",
                code="memory-of-no-run",
            )
        chosen = [one for one in found if not own.path or one.path.absolute() in map(Path.absolute, own.path)]
        if own.remove and not chosen:
            of = "of a job" if own.ckpt_dir is None else f"of the run in {own.ckpt_dir}"
            print_lines(f"nothing is removed: {own.memory_dir} has no memory {of}")
        elif own.remove:
            return int(not all([_removed(one, own.ended) for one in chosen]))  # a list: also after a failure
        else:
            total = f"{len(chosen)} directories, {sum(one.bytes for one in chosen) / 1e9:.3g} GB"
            print_lines(*map(_line, chosen), total)
        return 0
    except (CheckpointError, OSError) as error:
        return refused("clean_memory", error)


def _removed(one: Leftover, ended: bool) -> bool:
    try:
        remove_leftover(one, ended)
    except (CheckpointError, OSError) as error:
        refused("clean_memory", error)
        return False
    print_lines(f"removed  {_line(one)}")
    return True


def _line(one: Leftover) -> str:
    newest = "no snapshot" if one.newest is None else f"iteration {one.newest}"
    used = f", used by process {one.used_by[0]}" if one.used_by else ""
    of = f"run {one.run} in {one.address}" if one.run else "of no run that it names"
    return f"{one.path}  {one.bytes / 1e9:.3g} GB  {newest}  {of}{used}"
