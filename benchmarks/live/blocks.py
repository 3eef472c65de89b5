"""Measures the cost of saving within one job, which saves only in every second block of iterations.

Two identical jobs differ by some percent permanently, and the speed of one machine varies by ten percent from second to
second.  Within a job, adjacent blocks of a few iterations are comparable.  As a program, this is
``pretrain_gpt_moe.py`` that saves in such blocks, with the numbers of :class:`Blocks` in ``SAVING_FROM`` and
``SAVING_FOR``.  It writes clocks of the training thread to the file ``SAVING_CLOCKS`` (:func:`clocked`).

Even so, the machine's speed differs by a seventh between iterations, which hides one percent.  Background work of
saving is over before the second half of an iteration's micro batches.  So each iteration is also measured against its
own second half, which has the same machine speed without the snapshot.
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
    """Blocks of iterations, which determine when a job saves."""

    first: int  # first iteration of the blocks; before it, the job saves as usual
    length: int  # iterations of each block; a multiple of the window

    def number(self, iteration: int) -> int:
        """Returns the number of an iteration's block: -2 before the first block; even blocks save."""
        return -2 if iteration < self.first else (iteration - self.first) // self.length

    def saves(self, iteration: int) -> bool:
        """Returns whether this iteration may have a snapshot."""
        return self.number(iteration) % 2 == 0

    def overheads(self, seconds: Mapping[int, float]) -> list[float]:
        """Returns the relative overhead of each block that saves, compared with its two neighbours."""
        return [saving / beside - 1 for saving, beside in self.compared(seconds)]

    def compared(self, values: Mapping[int, float]) -> list[tuple[float, float]]:
        """Returns the mean of a value in each block that saves, and the mean in its two neighbours.

        A snapshot starts at the end of its iteration, is copied during the next one, and hashed then or a little later.
        So the first iteration of a block is not used, nor the second of a block that does not save.
        """
        by_block: dict[int, list[float]] = {}
        for iteration, value in values.items():
            number = self.number(iteration)
            if number >= 0 and self.number(iteration - 1 - number % 2) == number:
                by_block.setdefault(number, []).append(value)
        means = {number: fmean(values) for number, values in by_block.items()}
        last = max(means, default=0)  # the last block may be incomplete
        inner = [number for number in means if number % 2 == 0 and 0 < number < last - 1]
        return [(means[number], fmean((means[number - 1], means[number + 1]))) for number in inner]


def between(values: Sequence[float], share: float = 0.95, samples: int = 4000) -> tuple[float, float]:
    """Returns the bootstrap confidence interval of the median, with confidence ``share``."""
    chance = random.Random(0)
    medians = sorted(median(chance.choices(values, k=len(values))) for _ in range(samples))
    outside = int((1 - share) / 2 * samples)
    return medians[outside], medians[-1 - outside]


def in_blocks(plan, blocks: Blocks):
    """Returns the method ``plan`` of a policy, called only in blocks that save."""
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
        """Returns the last second half's wall time ``half_s``, and other threads' processor time ``beside_s``."""
        begun, self._begun = self._begun[len(self._begun) // 2], []
        wall, computing, all_threads = (end - start for start, end in zip(begun, self._ended, strict=True))
        return {"half_s": wall, "beside_s": all_threads - computing}


def _clocks() -> tuple[float, float, float]:
    """Returns the seconds of wall time, of this thread's processor time, and of all threads' processor time."""
    return time.perf_counter(), time.thread_time(), time.process_time()


def clocked(session: type, path: str, half: SecondHalf) -> None:
    """Makes sessions of this class write the clocks of the training thread, one line of JSON per iteration.

    Times are from commit to commit: ``wall_s``; ``code_s``, computing in the session's code; and ``away_s``, waiting
    for a processor, the GIL, copies or other workers.  A line also has the times of ``half``.
    """
    in_code, since = [0.0], [time.perf_counter(), time.thread_time()]
    for name in ("contribution", "on_totals", "completed", "take"):
        setattr(session, name, _counted(getattr(session, name), in_code))
    commit = session.completed  # pyright: ignore[reportAttributeAccessIssue]

    def completed(self, record, begun):
        position = commit(self, record, begun)
        now = [time.perf_counter(), time.thread_time()]
        wall, computing = (one - other for one, other in zip(now, since, strict=True))
        told = {"wall_s": wall, "code_s": in_code[0], "away_s": wall - computing, **half.take()}
        with open(path, "a") as lines:
            event = {"type": "clocks", "time": time.time(), "iteration": position.iteration, **told}
            lines.write(json.dumps(event) + "\n")
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
        policy: Any = kind.policy_class  # a method is replaced, which type checkers refuse
        policy.plan = in_blocks(policy.plan, Blocks(int(os.environ["SAVING_FROM"]), int(os.environ["SAVING_FOR"])))
    if os.environ.get("RANK", "0") == "0":
        clocked(Session, os.environ["SAVING_CLOCKS"], SecondHalf(schedules))
    sys.exit(program.main())
