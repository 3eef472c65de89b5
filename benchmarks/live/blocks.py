"""Blocks of iterations, of which every second one saves nothing: what saving costs, told by one job of itself.

Two jobs that do the same differ by percents for as long as they live, and one machine from one second to the next by
ten.  Within a job, and from one block of a few iterations to the next, both are alike.  As a program, this is
``pretrain_gpt_moe.py`` that saves so, with the numbers of :class:`Blocks` in ``SAVING_FROM`` and ``SAVING_FOR``; in the
file that ``SAVING_CLOCKS`` names it tells what the thread that trains does by its own clocks (:func:`clocked`).

Even so the machine's pace differs by a seventh from one iteration to the next, and hides a percent.  Whatever saving
does beside training is over before the second half of an iteration's micro batches; so each iteration is also measured
by its own second half, which has the machine's pace of that second and nothing of the snapshot.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any


@dataclass(frozen=True)
class Blocks:
    """When a job saves."""

    first: int  # the iteration with which they begin; before it the job saves as it would
    length: int  # iterations of each; whole windows

    def number(self, iteration: int) -> int:
        """Of the block that an iteration is in; even ones save, and what is before the first has the number -2."""
        return -2 if iteration < self.first else (iteration - self.first) // self.length

    def saves(self, iteration: int) -> bool:
        """Whether this iteration may have a snapshot."""
        return self.number(iteration) % 2 == 0

    def overheads(self, seconds: Mapping[int, float]) -> list[float]:
        """Of each block that saves, how much longer its iterations take than those of its neighbours, as a share."""
        return [saving / beside - 1 for saving, beside in self.compared(seconds)]

    def compared(self, values: Mapping[int, float]) -> list[tuple[float, float]]:
        """Of each block that saves, the mean of a value of its iterations, and that of its two neighbours.

        A snapshot begins at the end of its iteration, is copied while the next one is computed, and hashed meanwhile or
        a little later: so the first iteration of a block does not count, nor the second of one that does not save.
        """
        by_block: dict[int, list[float]] = {}
        for iteration, value in values.items():
            number = self.number(iteration)
            if number >= 0 and self.number(iteration - 1 - number % 2) == number:
                by_block.setdefault(number, []).append(value)
        means = {number: fmean(values) for number, values in by_block.items()}
        last = max(means, default=0)  # it may not be over
        inner = [number for number in means if number % 2 == 0 and 0 < number < last - 1]
        return [(means[number], fmean((means[number - 1], means[number + 1]))) for number in inner]


def between(values: Sequence[float], share: float = 0.95, samples: int = 4000) -> tuple[float, float]:
    """Between what their median lies, in ``share`` of the samples that such values could have been (bootstrap)."""
    chance = random.Random(0)
    medians = sorted(median(chance.choices(values, k=len(values))) for _ in range(samples))
    outside = int((1 - share) / 2 * samples)
    return medians[outside], medians[-1 - outside]


def in_blocks(plan, blocks: Blocks):
    """The method ``plan`` of a policy, which is asked only where the block saves."""
    return lambda self, iteration, *load: plan(self, iteration, *load) if blocks.saves(iteration) else None


class SecondHalf:
    """Times the second half of an iteration's micro batches.

    Args:
        schedules: the module of megatron-core whose ``forward_step`` and ``backward_step`` compute a micro batch.
    """

    def __init__(self, schedules: Any):
        self._begun, self._ended = [], _clocks()
        forward, backward = schedules.forward_step, schedules.backward_step

        def forward_step(*args, **named):
            self._begun.append(_clocks())
            return forward(*args, **named)

        def backward_step(*args, **named):
            gradients = backward(*args, **named)
            self._ended = _clocks()
            return gradients

        schedules.forward_step, schedules.backward_step = forward_step, backward_step

    def take(self) -> dict[str, float]:
        """Of the iteration that is over: ``half_s``, and ``beside_s`` of it that other threads computed."""
        begun, self._begun = self._begun[len(self._begun) // 2], []
        wall, computing, all_threads = (end - start for start, end in zip(begun, self._ended, strict=True))
        return {"half_s": wall, "beside_s": all_threads - computing}


def _clocks() -> tuple[float, float, float]:
    """Of the wall, of this thread, and of this process's threads together."""
    return time.perf_counter(), time.thread_time(), time.process_time()


def clocked(session: type, path: str, half: SecondHalf) -> None:
    """Has a session of this class tell of each iteration, in a line of JSON, what its thread did by its own clocks.

    That is from commit to commit: ``wall_s``, ``code_s`` computing in the session's code, and ``away_s`` not computing:
    waiting for a processor, for Python's lock, for copies, or for others; and what ``half`` tells.
    """
    in_code, since = [0.0], [time.perf_counter(), time.thread_time()]
    for name in ("ballot", "on_vote", "completed", "take"):
        setattr(session, name, _counted(getattr(session, name), in_code))
    commit = session.completed  # pyright: ignore[reportAttributeAccessIssue]

    def completed(self, record, begun):
        position = commit(self, record, begun)
        now = [time.perf_counter(), time.thread_time()]
        wall, computing = (one - other for one, other in zip(now, since, strict=True))
        told = {"wall_s": wall, "code_s": in_code[0], "away_s": wall - computing, **half.take()}
        with open(path, "a") as lines:
            lines.write(json.dumps({"type": "clocks", "iteration": position.iteration, **told}) + "\n")
        since[:], in_code[0] = now, 0.0
        return position

    session.completed = completed  # pyright: ignore[reportAttributeAccessIssue]


def _counted(method, seconds: list[float]):
    def counted(*args, **named):
        begun = time.thread_time()
        try:
            return method(*args, **named)
        finally:
            seconds[0] += time.thread_time() - begun

    return counted


if __name__ == "__main__":
    from megatron.pretraining import pretrain_gpt_moe as program
    from moc.policy import POLICIES
    from moc.session.session import Session

    program.warm_up()
    from megatron.core.pipeline_parallel import schedules

    for kind in POLICIES.values():
        policy: Any = kind  # of which a method is replaced
        policy.plan = in_blocks(policy.plan, Blocks(int(os.environ["SAVING_FROM"]), int(os.environ["SAVING_FOR"])))
    if os.environ.get("RANK", "0") == "0":
        clocked(Session, os.environ["SAVING_CLOCKS"], SecondHalf(schedules))
    sys.exit(program.main())
