"""The memory tier of this node: directories of shared memory, the buffers and bytes that it needs, and its removal.

A policy with windows resumes from several snapshots together.  Memory then holds the newest complete window and the one
in progress, and storage may be reading another one.  Every other policy has windows of one snapshot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

from moc.cli_output import print_once
from moc.files.safe_directory import remove_owned
from moc.store.errors import CheckpointError
from moc.store.ownership import Claim, lives
from moc.store.reserved_memory import SLOTS_DIRECTORY
from moc.store.storage import RESERVE_FILE, LocalStorage, lease_remaining_s
from moc.store.store import Store, find_run, storage_at

SOCKETS_DIRECTORY = ".sockets"
"""Name of the directory in a user's memory for the sockets of running jobs (:mod:`moc.runtime.socket_directory`).

No run has this name, since the directory of a run ends with two numbers.
"""

SPARE = 2
"""Buffers in addition to recovery's: one being filled, one being written to storage (MoC-System, section 5.2)."""

_OF_NODE = "-node-"
_MAX_DIRECTORIES = 100  # names that are tried, since other users can make directories under them


def memory_storage(
    memory_dir: str | Path, job: str, run: str, node: str | None = None, claim: Claim | None = None
) -> LocalStorage:
    """Returns this node's memory for a run: a directory of shared memory that outlives processes, not the machine.

    The directory name contains the run's name, so that no job finds the memory of another run.  The checkpoint
    directory may have been recreated, and containers that share the memory may use one path for different directories.

    Args:
        memory_dir: memory file system, usually ``/dev/shm``.
        job: directory or URL of the checkpoints.
        run: name of their run (:mod:`moc.store.store`).
        node: name of the node, unique among nodes that share the file system; None if each machine is one node.
        claim: claim under which files are written.

    Raises:
        CheckpointError: the directory cannot be made, or belongs to another user.
    """
    root = memory_path_of_run(memory_dir, job, run)
    return LocalStorage(root if node is None else _path_on_node(root, node), in_memory=True, claim=claim)


def memory_path_of_run(memory_dir: str | Path, job: str, run: str) -> Path:
    """Returns the path of a run's memory on every node; nodes that share a file system add their name.

    Arguments and errors as for :func:`memory_storage`.
    """
    return user_directory(memory_dir) / f"{_address_prefix(job)}{run}"


def memory_paths_of_node(run: Path, node: str) -> list[Path]:
    """Returns the possible directories of a run's memory (:func:`memory_path_of_run`) on a node, existing or not."""
    return [run, _path_on_node(run, node)]


def is_memory_of_run(path: Path, run: Path) -> bool:
    """Returns whether a directory is a run's memory on any node, in any directory of the user."""
    return path.name == run.name or path.name.startswith(f"{run.name}{_OF_NODE}")


def memory_paths_of_other_runs(memory_dir: str | Path, job: str, run: str) -> list[Path]:
    """Returns the memory left on this machine by other runs with the same checkpoint address."""
    name = _address_prefix(job)
    paths = sorted(
        path for home in user_directories(memory_dir) for path in home.iterdir() if path.name.startswith(name)
    )
    return [path for path in paths if not is_memory_of_run(path, Path(f"{name}{run}"))]


def user_directory(memory_dir: str | Path) -> Path:
    """Returns the parent directory of a user's jobs in a memory file system: ``moc-UID``, or ``moc-UID-1`` to ``-99``.

    It is the first of these that is a directory of this user with mode 0700; if there is none, the first that can be
    made.  So another user cannot block a job by making ``moc-UID``, nor hide snapshots by removing it later.  Launchers
    and the first worker of each node print a name other than the first.

    Raises:
        CheckpointError: all names are taken, or nothing can be made there.
    """
    homes = _candidate_directories(memory_dir)
    try:
        home = next(filter(_is_private_directory, homes), None) or next(filter(_create_private_directory, homes), None)
    except OSError as error:
        raise CheckpointError(
            f"{homes[0]} cannot be used for snapshots ({error.strerror}). Fix: name a memory file system with "
            "--ckpt-memory-dir",
            code="memory-directory-unusable",
        ) from None
    if home is None:
        raise CheckpointError(
            f"{homes[0]} is not a directory that only its owner, this user, can use, nor are {homes[1].name} to "
            f"{homes[-1].name}. Fix: remove it, or name another memory file system with --ckpt-memory-dir",
            code="memory-directory-unusable",
        )
    if home != homes[0]:
        print_once(f"{homes[0]} is not a directory that only this user can use: its jobs use {home}")
    return home


def user_directories(memory_dir: str | Path) -> list[Path]:
    """Returns all candidates of :func:`user_directory`, in its order; several if two jobs raced for a name.

    Raises:
        CheckpointError: as :func:`user_directory`.
    """
    user_directory(memory_dir)
    return [home for home in _candidate_directories(memory_dir) if _is_private_directory(home)]


def _candidate_directories(memory_dir: str | Path) -> list[Path]:
    name = f"moc-{os.geteuid()}"
    return [Path(memory_dir) / f"{name}{f'-{number}' * bool(number)}" for number in range(_MAX_DIRECTORIES)]


def _is_private_directory(home: Path) -> bool:
    """Returns whether a path is a directory that only this user can use."""
    with suppress(FileNotFoundError):
        status = home.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    return False


def _create_private_directory(home: Path) -> bool:
    """Makes a directory unless the name is taken; returns whether it is this user's now."""
    with suppress(FileExistsError):
        home.mkdir(mode=0o700)
    return _is_private_directory(home)


def _address_prefix(job: str) -> str:
    address = job.rstrip("/") if "://" in job else os.path.abspath(job)
    return f"{os.path.basename(address)}-{xxhash.xxh3_64_hexdigest(address.encode())}-"


def _path_on_node(run: Path, node: str) -> Path:
    return run.with_name(f"{run.name}{_OF_NODE}{node}")


@dataclass(frozen=True)
class Leftover:
    """One node's memory for a run.

    Attributes:
        path: directory.
        run: name of the run; None if the directory does not record it.
        address: address of its checkpoints, as seen by the job.
        newest: iteration of the newest snapshot; None without one.
        bytes: memory used.
        used_by: processes of this user that use it, if visible from here.
    """

    path: Path
    run: str | None
    address: str | None
    newest: int | None
    bytes: int
    used_by: tuple[int, ...]


def leftovers(memory_dir: str | Path) -> list[Leftover]:
    """Returns all memory of this user's jobs in a memory file system, running ones included.

    Raises:
        CheckpointError: the directory cannot be made, or belongs to another user.
    """
    paths = sorted(path for home in user_directories(memory_dir) for path in home.iterdir())
    return [leftover(path) for path in paths if _is_memory_directory(path)]


def leftovers_of(memory_dir: str | Path, job: str) -> list[Leftover]:
    """Returns the memory of the run whose checkpoints are in a directory or URL, on all nodes that share this machine.

    Raises:
        CheckpointError: no run has begun there, or as :func:`leftovers`.
        OSError: the checkpoints' location cannot be read.
    """
    run = find_run(storage_at(job))
    if run is None:
        raise CheckpointError(
            f"no run has begun in {job}. Fix: name the directory or URL of its checkpoints", code="run-unknown"
        )
    path = memory_path_of_run(memory_dir, job, run.run)
    return [memory for memory in leftovers(memory_dir) if is_memory_of_run(memory.path, path)]


def _is_memory_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and path.name != SOCKETS_DIRECTORY


def leftover(path: Path) -> Leftover:
    """Describes one directory."""
    storage = LocalStorage(path, in_memory=True)
    try:
        run = find_run(storage)
    except OSError:
        run = None
    newest = max(Store(storage, allows_slack=True).iterations(), default=None)
    return Leftover(path, run and run.run, (run and run.address) or None, newest, _bytes(path), tuple(_users(path)))


def remove_leftover(memory: Leftover, ended: bool = False) -> None:
    """Removes a leftover.

    Args:
        memory: the leftover.
        ended: its job is known to have ended, so that its lease does not matter.

    Raises:
        CheckpointError: a process uses the memory, or the job's lease has not expired.
        OSError: it cannot be removed.
    """
    if users := tuple(_users(memory.path)):
        raise CheckpointError(
            f"{memory.path} is used by process {users[0]}. Fix: stop that job first", code="memory-in-use"
        )
    if not ended and (left_s := lease_remaining_s(memory.path)) > 0:
        raise CheckpointError(
            f"{memory.path} is of a job that was alive a moment ago and may continue. Fix: wait {math.ceil(left_s)} s, "
            "or give --ended if that job has ended",
            code="memory-in-use",
        )
    remove_owned(memory.path)


def give_back(run: Path, node: str) -> None:
    """Removes a finished run's leftovers from a node's memory (:mod:`moc.store.host_memory`), except those in use.

    Raises:
        CheckpointError: the directory is not the memory of a run.
        OSError: it cannot be removed.
    """
    paths = [path for path in memory_paths_of_node(run, node) if path.is_dir()]
    if paths and run.parent not in user_directories(run.parent.parent):
        raise CheckpointError(
            f"{run} is not the memory of a run. Fix: name a directory that tools/clean_memory.py lists",
            code="memory-of-no-run",
        )
    for path in paths:
        if not any(_users(path)):  # otherwise the run has resumed there, or another node of this machine is not done
            remove_owned(path)


def give_back_unused(memory: Path) -> None:
    """Removes unused buffers from a run's memory on this node, and the memory itself if nothing else is in it.

    The job of this process must be about to end.  Snapshots, logs and files that cannot be removed stay.
    """
    with contextlib.suppress(OSError):
        for slot in memory.rglob(f"{SLOTS_DIRECTORY}/*"):
            if slot.lstat().st_nlink == 1:
                remove_owned(slot)
        for spare in memory.rglob(RESERVE_FILE):
            remove_owned(spare)
        if not any(path.is_file() and not path.name.startswith(".") for path in memory.rglob("*")):
            remove_owned(memory)


def _bytes(path: Path) -> int:
    """Returns the number of bytes of the files; a file with several names counts once."""
    sizes = {}
    for file in path.rglob("*"):
        try:
            status = file.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        if stat.S_ISREG(status.st_mode):
            sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def _users(path: Path) -> Iterator[int]:
    """Yields the owner of the directory, and every process that maps one of its buffers.

    The owner may just have died while its job continues; in another container, only its lock is visible.
    """
    owner = lives(path)
    if owner is not None:
        yield owner.pid
    inside = f" {os.path.realpath(path)}/"
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or (owner is not None and int(process.name) == owner.pid):
            continue
        try:
            if inside in (process / "maps").read_text(errors="replace"):
                yield int(process.name)
        except OSError:  # it has ended, or belongs to another user
            continue


def spare_buffers(tier: str) -> int:
    """Returns the number of a rank's buffers beyond recovery's: with peers, other nodes copy from one more."""
    return SPARE + (tier == "peers")


def most_buffers(kept: int, window: int, spare: int, stores: bool) -> int:
    """Returns the maximum number of a rank's buffers where memory keeps the snapshots that recovery needs.

    Args:
        kept: snapshots that recovery needs, at most.
        window: snapshots of a window.
        spare: as :func:`spare_buffers`.
        stores: windows are also written to storage, which may take long to read one of them.
    """
    return most_copies(kept, spare) + (window - 1) * stores


def most_copies(kept: int, spare: int) -> int:
    """Returns the maximum number of a rank's snapshots in the memory of a node with copies; arguments as above."""
    return kept + spare


def reserved_bytes(count: int, full: float, snapshot: float | None) -> float:
    """Returns the bytes of the buffers of :func:`reserved_sizes`."""
    return full + (full if snapshot is None else snapshot) * (count - 1)


def reserved_sizes(count: int, full: int, snapshot: int | None) -> list[int]:
    """Returns the bytes of each buffer: one for a full snapshot, the others for ``snapshot`` (default: also full)."""
    return [full] + [full if snapshot is None else snapshot] * (count - 1)


class RankMemory(NamedTuple):
    """Bytes that a rank needs.

    Attributes:
        own: of each of its buffers.
        copies: of each copy of its snapshots that another node keeps.
        small: for manifests and reports.
        logs: of upstream logs.
        experts: of each file of experts that its node retains, on the rank that leads the node; otherwise empty.
    """

    own: Sequence[int]
    copies: Sequence[int]
    small: int
    logs: int
    experts: Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class ReservedMemory:
    """Bytes that a node needs.

    Attributes:
        own: of the buffers of its workers.
        copies: for copies of other nodes' snapshots.
        small: for manifests and reports.
        logs: of upstream logs.
        experts: of retained experts, including copies.
    """

    own: int
    copies: int
    small: int
    logs: int
    experts: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(dataclasses.astuple(self))

    @classmethod
    def most(cls, nodes: Iterable[ReservedMemory]) -> ReservedMemory:
        """Returns the largest of several."""
        return max(nodes, key=lambda memory: memory.total)

    @classmethod
    def of(
        cls, sizes: Sequence[RankMemory], nodes: Sequence[str], copied_by_rank: Sequence[Sequence[str]]
    ) -> dict[str, ReservedMemory]:
        """Adds up the needs of ranks, by node.

        Args:
            sizes: by rank.
            nodes: by rank, the name of its node.
            copied_by_rank: by rank, the nodes whose snapshots its node copies; empty without peers.
        """
        by_node: dict[str, list[RankMemory]] = {node: [] for node in nodes}
        for node, memory in zip(nodes, sizes, strict=True):
            by_node[node].append(memory)
        copied_by = dict(zip(nodes, copied_by_rank, strict=True)) if copied_by_rank else {}
        needs = {}
        for node, ranks in by_node.items():
            copied_nodes = copied_by.get(node, ())
            own, small = sum(sum(memory.own) for memory in ranks), sum(memory.small for memory in ranks)
            copies = sum(sum(memory.copies) for copied in copied_nodes for memory in by_node[copied])
            logs, with_copies = (
                sum(memory.logs for memory in ranks),
                [*ranks, *(memory for copied in copied_nodes for memory in by_node[copied])],
            )
            experts = sum(sum(sizes) for memory in with_copies for sizes in memory.experts.values())
            needs[node] = cls(own, copies, small * (1 + len(copied_nodes)), logs, experts)
        return needs

    def describe(self) -> str:
        """Returns a sentence for users."""
        parts = [f"{self.own / 1e9:.3g} GB for its own snapshots"]
        if self.copies:
            parts.append(f"{self.copies / 1e9:.3g} GB for copies of other nodes' snapshots")
        if self.experts:
            parts.append(f"{self.experts / 1e9:.3g} GB for experts that newer snapshots lack")
        if self.logs:
            parts.append(f"{self.logs / 1e9:.3g} GB for upstream logs")
        return f"snapshots take {self.total / 1e9:.3g} GB of a node's memory: {', '.join(parts)}"
