"""Runs a worker's process that hashes the entries of its snapshots in memory.

A snapshot has hundreds of entries.  A thread of the worker would acquire and release the GIL for each of them, while
training needs it continuously.  The worker starts this process (:mod:`moc.runtime.helper_process`), and sends it path
and size of a buffer, and the byte spans of its entries.  The process returns the hashes.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

from moc.files.safe_directory import SafeDirectory
from moc.runtime import child_processes
from moc.runtime.helper_process import answer_calls
from moc.store.manifest import compute_digest


def main() -> None:
    """Hashes until the worker ends."""
    child_processes.attach_in_background()
    answer_calls(_answer)


def _answer(call: list) -> list[str] | str:
    try:
        return digests(*call)
    except (OSError, ValueError) as error:  # the worker then hashes
        return str(error)


def digests(path: str, nbytes: int, spans: Sequence[tuple[int, int]]) -> list[str]:
    """Returns the hashes of spans of a file in memory, each of bytes [start, stop).

    Raises:
        OSError, ValueError: the file cannot be mapped, or is another file, of another size.
    """
    opened = SafeDirectory(Path(path).parent).open(Path(path).name)
    with open(opened, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        if len(mapped) != nbytes:
            raise ValueError(f"{path} has {len(mapped):,} bytes, not {nbytes:,}")
        with memoryview(mapped) as memory:
            found = []
            for start, stop in spans:
                with memory[start:stop] as entry:
                    found.append(compute_digest(entry))
            return found


if __name__ == "__main__":
    main()
