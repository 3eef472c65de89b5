"""What processes that should go on, and do not, are doing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import psutil


def standing(processes: Iterable[psutil.Process]) -> list[str]:
    """A line for each process: its number, its state, the program, and what its threads wait for in the kernel."""
    return [line for process in processes if (line := _line(process))]


def _line(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        words = process.cmdline()
        program = next((words[i + 1] for i, word in enumerate(words[:-1]) if word == "-m"), " ".join(words[:2]))
        return f"{process.pid} {process.status()} {program}: {_waits(process.pid)}"
    return ""


def _waits(pid: int) -> str:
    """By what threads wait for, how many do."""
    counts: dict[str, int] = {}
    for thread in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(OSError):
            name = (thread / "wchan").read_text() or "running"
            counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{name} x{count}" if count > 1 else name for name, count in counts.items())
