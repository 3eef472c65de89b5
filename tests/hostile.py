"""Checkpoint directories as a stranger may send them, and a record of the paths that an operation uses.

A world is a directory with the checkpoints, ``ckpt``, the memory file system, ``memory``, and beside them ``victims``,
which nothing may change.
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import io
import json
import os
import random
import re
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moc.store.ownership import NAME as FENCE
from moc.store.ownership import Claim, Holder
from moc.store.store import RUN_FILE as RUN
from tests.mutations import signed

CHANGES = {"write", "link", "symlink", "rename", "unlink", "rmdir", "mkdir", "truncate", "chmod", "chown", "mknod"}
"""Uses of a path other than reading it."""

_LEVELS = 40  # of a deep directory


def add_victims(world: Path) -> None:
    """Makes files and directories beside the checkpoints, some with names that this package gives."""
    victims = world / "victims"
    for name in ("iter_0000100", "iter_0000300", "slots"):
        (victims / name).mkdir(parents=True)
        (victims / name / "manifest.json").write_text("precious")
        (victims / name / "rank_00000.safetensors").write_text("precious")
    for name in (FENCE, RUN, "precious", "latest_checkpointed_iteration.txt", ".lock.job-0-1"):
        (victims / name).write_text("precious")


def state_of(world: Path, changing: tuple[str, ...]) -> dict[str, object]:
    """Mode, owner, time and content, of large files the size, of all files of a world but those below ``changing``."""
    found = {}
    for directory, names, files in os.walk(world):
        if Path(directory) == world:
            names[:] = [name for name in names if name not in changing]
            files = [name for name in files if name not in changing]
        for name in (*names, *files):
            path = Path(directory, name)
            status = path.lstat()
            content = hashlib.sha256(path.read_bytes()).hexdigest() if _is_small(path) else status.st_size
            found[str(path.relative_to(world))] = status.st_mode, status.st_uid, status.st_mtime_ns, content
    return found


def make_hostile(rng: random.Random, world: Path, places: tuple[Path, ...]) -> list[str]:
    """Changes some entries of directories, and adds others; returns what it did."""
    done = []
    for _ in range(rng.randint(1, 4)):
        place = rng.choice([*places, places[0], places[0]])
        action = rng.choice([_replace_one, _replace_one, _add_one, _add_one, _forge_one])
        with contextlib.suppress(
            OSError, LookupError, ValueError, RecursionError
        ):  # nothing that it could change is left
            done.append(f"{place.relative_to(world)}: {action(rng, world, place)}")
    return done


def _targets(rng: random.Random, world: Path, path: Path) -> str:
    victims = world / "victims"
    absolute = rng.choice([victims, *victims.iterdir(), world, path.parent, path])
    return rng.choice([str(absolute), os.path.relpath(absolute, path.parent), "..", ".", "nothing", "../../victims"])


def _as_link(rng: random.Random, world: Path, path: Path) -> None:
    path.symlink_to(_targets(rng, world, path))


def _as_hard_link(rng: random.Random, world: Path, path: Path) -> None:
    os.link(world / "victims" / rng.choice(["precious", FENCE, "iter_0000100/manifest.json"]), path)


def _as_fifo(rng: random.Random, world: Path, path: Path) -> None:
    os.mkfifo(path)


def _as_socket(rng: random.Random, world: Path, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(path.parent, os.O_RDONLY)
        try:
            listener.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


def _as_sparse(rng: random.Random, world: Path, path: Path) -> None:
    with open(path, "xb") as file:
        file.truncate(rng.choice([1, 1 << 20, (64 << 20) + 1, 1 << 38]))


def _as_bytes(rng: random.Random, world: Path, path: Path) -> None:
    content = rng.choice([b"", b"\0", b"{", b"[]", b"\xff" * 9, b"[" * 9999, b"100", b"\x1b[2J", b"../victims"])
    _write(path, content)


def _as_directory(rng: random.Random, world: Path, path: Path) -> None:
    path.mkdir()
    if rng.random() < 0.7:
        _any_kind(rng)(rng, world, path / rng.choice(["manifest.json", "rank_00000.safetensors", "x", ".x.tmp"]))


def _as_deep_directory(rng: random.Random, world: Path, path: Path) -> None:
    for _ in range(_LEVELS):
        path.mkdir()
        path = path / "d"


def _as_special_mode(rng: random.Random, world: Path, path: Path) -> None:
    _write(path, b"x")
    path.chmod(rng.choice([0, 0o4755, 0o2755, 0o666, 0o7777]))


def _as_open_directory(rng: random.Random, world: Path, path: Path) -> None:
    path.mkdir()
    path.chmod(rng.choice([0o777, 0o1777, 0o2775, 0]))


_KINDS: list[Callable[[random.Random, Path, Path], None]] = [
    *[_as_link] * 6, *[_as_hard_link] * 2, _as_fifo, _as_socket, _as_sparse, *[_as_bytes] * 2, *[_as_directory] * 2,
    _as_deep_directory, _as_special_mode, _as_open_directory,
]  # fmt: skip


def _any_kind(rng: random.Random) -> Callable[[random.Random, Path, Path], None]:
    return rng.choice(_KINDS)


def _replace_one(rng: random.Random, world: Path, place: Path) -> str:
    path = rng.choice(sorted(_below(place)))
    kind = _any_kind(rng)
    kept = path.with_name(f"{path.name}.moved")
    path.rename(kept)
    if rng.random() < 0.5 or kept.is_dir():
        kept.rename(world / "victims" / f"moved-{len(os.listdir(world / 'victims'))}")
    kind(rng, world, path)
    return f"{path.relative_to(place)} {kind.__name__}"


def _below(place: Path) -> Iterator[Path]:
    for directory, names, files in os.walk(place):
        yield from (Path(directory, name) for name in (*names, *files))


_NAMES = [
    "iter_0000300", "iter_0000500", "iter_0000005", "iter_99999999999999999999999", "iter_0000100.old", "iter_5",
    ".iter_0000300.incomplete", ".iter_0000500.incomplete", ".iter_0000300.job-0-0.incomplete",
    ".iter_0000300.job-0-0.incomplete.given-up", ".iter_0000300.replaced", ".iter_0000100.replaced",
    ".iter_0000010.replaced", ".fence.x.tmp", ".manifest.json.job-0-0.0123456789abcdef.tmp", ".x.tmp",
    ".lock.job-0-1", ".lock.job-9-9", ".lock.other-0-1", ".lock", ".fence", RUN, "slots", "logs", "copies",
    "latest_checkpointed_iteration.txt", "notes.txt", "...", "-rf", "iter_0000100\n", "iter_0000300\x1b[2J",
    "iter_\u0661\u0662\u0663\u0664\u0665\u0666\u0667",
    "\u202eiter_0000300", "\udcff\udcfe", "a" * 255, " ", "~", "*", "%2e%2e",
    ".iter_0000300.*.incomplete", "iter_0000010/.rank_00000.json", "iter_0000010/manifest.json.removed",
    "iter_0000020/manifest.json.superseded.job-0-0", "iter_0000020/.manifest.json.job-0-0.0123456789abcdef.tmp",
    "iter_0000020/rank_00002.safetensors", "iter_0000020/..x", "iter_0000020/.metadata",
    "events.jsonl", "events.jsonl", ".lease", ".owner.json", "Iter_0000300", "ITER_0000300", ".FENCE", ".Run.json",
    f"iter_{'3' * 250}", f".iter_0000300.{'x' * 229}.incomplete", "iter_0000300/../iter_0000400", "iter_-000300",
    "iter_0000300 ", "iter_+000300", "iter_0x00300", "iter_00003e2", "IT\u0130R_0000300",
]  # fmt: skip


def _add_one(rng: random.Random, world: Path, place: Path) -> str:
    path, kind = place / rng.choice(_NAMES), _any_kind(rng)
    kind(rng, world, path)
    return f"{path.relative_to(place)!r} {kind.__name__}"


_ABSOLUTE = "absolute"  # stands for the path of a victim
_EVIL = [
    "../victims", "../../victims/precious", _ABSOLUTE, "..", ".", "", "x/../../victims", "a\0b", "a\nb", "\x1b[2J",
    "x" * 5000, None, -1, 1 << 70, 0.5, True, [], {}, "../iter_0000010/rank_00000.safetensors",
]  # fmt: skip


def _forge_one(rng: random.Random, world: Path, place: Path) -> str:
    """Changes the content of a file whose hash it can compute."""
    evil = rng.choice(_EVIL)
    evil = str(world / "victims" / "precious") if evil == _ABSOLUTE else evil
    choice = rng.random()
    if choice < 0.25:
        fields = {"run": evil if rng.random() < 0.7 else "f" * 16, "address": str(evil), "made": 1.0}
        _write(place / RUN, json.dumps(fields).encode())
    elif choice < 0.5:
        job = evil if isinstance(evil, str) and len(evil) < 999 else "x"
        holder = Holder(Claim(job, (rng.choice([0, 1 << 60]), 7)), "host", rng.choice([0, 1, os.getpid()]), (job,))
        _write(place / FENCE, holder.to_json().encode())
    else:
        path = rng.choice(sorted(filter(_is_small, place.glob("iter_*/manifest.json"))))
        plain = json.loads(path.read_text())
        if not isinstance(plain, dict):  # an earlier change has replaced it
            plain = {"files": {}}
        plain.pop("xxh3_128", None)
        kind = rng.choice(["file", "run", "iteration", "operator", "state"])
        if kind == "file":
            plain["files"] = {str(evil): entry for entry in plain["files"].values()}
        elif kind == "operator":
            plain["operators"] = {str(evil): entry for entry in plain.get("operators", {}).values()}
        else:
            plain[kind] = evil
        _write(path, signed(plain).encode())
    return f"forged {evil!r:.40}"


def _is_small(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISREG(status.st_mode) and status.st_size < 1 << 20


def _write(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)  # opening a FIFO to write would wait
    path.write_bytes(content)


class Uses:
    """The paths that are used while it is active, with how: ``read`` or one of :data:`CHANGES`."""

    def __init__(self):
        self.found: set[tuple[str, str]] = set()

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Wraps the functions that use paths."""
        wrapped = {
            (os, name): getattr(os, name)
            for name in (
                "open", "link", "symlink", "rename", "replace", "unlink", "remove", "rmdir", "mkdir", "truncate",
                "chmod", "chown", "mknod", "mkfifo", "listdir", "scandir", "utime",
            )
        } | {(builtins, "open"): builtins.open, (io, "open"): io.open}  # fmt: skip
        for (module, name), original in wrapped.items():
            setattr(module, name, self._wrapper(module, name, original))
        try:
            yield
        finally:
            for (module, name), original in wrapped.items():
                setattr(module, name, original)

    def _wrapper(self, module: Any, name: str, original: Callable) -> Callable:
        def wrapper(*args, **how):
            self._note(module, name, args, how)
            return original(*args, **how)

        return wrapper

    def _note(self, module: Any, name: str, args: tuple, how: dict) -> None:
        path = args[0] if args else how.get("path", how.get("file", "."))
        if isinstance(path, int):
            return
        where = how.get("dir_fd")
        if name == "open" and module is os:
            flags = args[1] if len(args) > 1 else how["flags"]
            changes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            self._add("write" if changes else "read", path, where, follow=not flags & os.O_NOFOLLOW)
        elif name == "open":
            mode = args[1] if len(args) > 1 else how.get("mode", "r")
            if how.get("opener") is None:  # which calls os.open
                self._add("read" if set(mode) <= set("rbt") else "write", path, None, follow=True)
        elif name in ("listdir", "scandir"):
            self._add("read", path, None, follow=True)
        elif name in ("rename", "replace", "link"):
            kind = "link" if name == "link" else "rename"
            self._add(kind, path, how.get("src_dir_fd"), follow=False)
            self._add(kind, args[1], how.get("dst_dir_fd"), follow=False)
        elif name == "symlink":
            self._add(name, args[1], where, follow=False)
        else:
            kind = {"remove": "unlink", "mkfifo": "mknod", "utime": "chmod"}.get(name, name)
            self._add(kind, path, where, follow=name in ("truncate", "chmod", "chown", "utime"))

    def _add(self, kind: str, path: Any, directory: int | None, follow: bool) -> None:
        path = os.fsdecode(path)
        if directory is not None:
            above = os.readlink(f"/proc/self/fd/{directory}")  # without links
            if not follow and "/" not in path and path not in (".", ".."):
                self.found.add((kind, os.path.join(above, path)))
                return
            path = os.path.join(above, path)
        path = os.path.abspath(path) if not path.startswith("/proc/self/fd/") else path
        above, name = os.path.split(path)
        whole = os.path.realpath(path) if follow else os.path.join(os.path.realpath(above), name)
        self.found.add((kind, whole))


def outside(uses: set[tuple[str, str]], inside: tuple[Path, ...], known: set[tuple[str, str]]) -> list[str]:
    """The uses of paths that are neither in some directories, nor in uses that are known, but for numbers in names."""
    roots = tuple(os.path.realpath(path) for path in inside)
    seen = {general(use) for use in known}
    return sorted(
        f"{kind} {path!r}"
        for kind, path in uses
        if not any(path == root or path.startswith(f"{root}/") for root in roots)
        and (kind, path) not in known
        and general((kind, path)) not in seen
    )


def general(use: tuple[str, str]) -> tuple[str, str]:
    """A use without process ids, descriptors and random names."""
    kind, path = use
    return kind, re.sub(r"[0-9a-f]{8,}|\d+", "N", path)
