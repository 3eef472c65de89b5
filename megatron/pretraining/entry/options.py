"""The option strings of Megatron-LM's parser, kept in a file, so that a launcher knows them without importing it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import xxhash

from moc.files import decode
from moc.files.safe_directory import MAX_CONFIG_BYTES, RefusedFileError, SafeDirectory

_SOURCE = "megatron/training/arguments.py"


def _file(source: Path) -> Path:
    """Returns the file for the parser in a source file; another version of the source has another file."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    status = source.stat()
    identity = f"{source.resolve()} {status.st_size} {status.st_mtime_ns}"
    return base / "moc" / f"options-{xxhash.xxh3_64_hexdigest(identity.encode())}.json"


def remember(source: str | Path, spellings: Iterable[str]) -> None:
    """Keeps the option strings of a parser, unless they are kept already or cannot be."""
    with contextlib.suppress(OSError, RuntimeError):  # no home directory
        file = _file(Path(source))
        if not file.exists():
            SafeDirectory(file.parent).write(file.name, [json.dumps(sorted(spellings)).encode()])


def remembered(places: Sequence[Path]) -> frozenset[str]:
    """Returns the option strings of Megatron-LM at the first of these paths that has it; empty if unknown."""
    source = next((place / _SOURCE for place in places if (place / _SOURCE).is_file()), None)
    if source is not None:
        with contextlib.suppress(OSError, RuntimeError, ValueError, RefusedFileError):
            file = _file(source)
            return frozenset(
                decode.decode(SafeDirectory(file.parent).read(file.name, MAX_CONFIG_BYTES), tuple[str, ...])
            )
    return frozenset()
