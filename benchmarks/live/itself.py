"""Runs a job that saves in every second block of iterations, to compare blocks with and without saving."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.live.blocks import Blocks
from benchmarks.live.job import ROOT, Events, Job

SAVING_IN_BLOCKS = str(ROOT / "benchmarks/live/blocks.py")
"""Path of the training program that saves according to :class:`Blocks` from its environment."""


def beside_itself(command: Callable[[str], Sequence[object]], blocks: Blocks, count: int, what: str) -> list[dict]:
    """Runs a job until ``count`` blocks have saved, each between two blocks that have not; returns events and clocks.

    Args:
        command: returns the command of the job for a program.
        blocks: blocks of iterations; the first begins after the warm-up.
        count: number of blocks that save.
        what: name of the job, for progress messages.
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
    """Returns the seconds that each iteration took, by iteration."""
    return {event["iteration"]: event["elapsed_s"] for event in events if event["type"] == "iteration"}
