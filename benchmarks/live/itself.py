"""A job that saves in every second block of iterations, so that it can be compared with itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.live.blocks import Blocks
from benchmarks.live.job import ROOT, Events, Job

SAVING_IN_BLOCKS = str(ROOT / "benchmarks/live/blocks.py")
"""The program that users run, with :class:`Blocks` as its environment says."""


def beside_itself(command: Callable[[str], Sequence[object]], blocks: Blocks, count: int, what: str) -> list[dict]:
    """Runs a job until ``count`` blocks have saved, each between two that have not; what it has told, clocks included.

    Args:
        command: from a program to how the job is started.
        blocks: the first begins when the job is warm.
        count: of blocks that save.
        what: named while it runs.
    """
    with TemporaryDirectory(prefix="overhead-") as files:
        clocks = Events(Path(files) / "clocks.jsonl")
        when = {"SAVING_FROM": str(blocks.first), "SAVING_FOR": str(blocks.length), "SAVING_CLOCKS": str(clocks.path)}
        with Job(command(SAVING_IN_BLOCKS), files, True, environment=when) as job:
            for pair in range(count + 1):
                job.reach(blocks.first + (2 * pair + 1) * blocks.length)
                print(f"{what}: block {pair} of {count}", file=sys.stderr, flush=True)
            return [*job.events.all(), *clocks.all()]


def seconds_of(events: Sequence[Mapping]) -> dict[int, float]:
    """By iteration, what it took."""
    return {event["iteration"]: event["elapsed_s"] for event in events if event["type"] == "iteration"}
