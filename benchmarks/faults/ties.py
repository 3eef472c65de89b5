"""Finds tokens that two runs route to different experts, and whether the choice was a tie; pure except for reading.

Two runs of an elastic job with different members sum the same numbers in different groups, so that logits differ by
rounding.  If the last chosen expert of a token and the next one have equal logits, rounding decides the choice, and
from then on the runs differ.  A comparison of their losses must take this into account.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

Key = tuple[int, int, int]
"""Iteration, micro batch, layer."""


@dataclass(frozen=True)
class Routed:
    """Routing of the tokens of a micro batch in a layer.

    Attributes:
        experts: experts of each token.
        close: by token, the margin between the last chosen logit and the next one, if the choice was close.
    """

    experts: tuple[str, ...]
    close: Mapping[int, float]


@dataclass(frozen=True)
class Choice:
    """A token that two runs route to different experts; a run's margin is infinite if its choice was not close."""

    iteration: int
    micro_batch: int
    layer: int
    token: int
    margins: tuple[float, float]


def read(directory: Path) -> dict[Key, Routed]:
    """Reads the routing of all workers of a run (benchmarks/live/routing.py); the newest of repeated computations."""
    newest: dict[Key, tuple[float, Routed]] = {}
    for path in directory.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            with suppress(ValueError):  # an incomplete line of a killed worker
                told = json.loads(line)
                key = told["iteration"], told["micro_batch"], told["layer"]
                close = {int(token): margin for token, margin in told["close"].items()}
                if key not in newest or newest[key][0] < told["time"]:
                    newest[key] = told["time"], Routed(tuple(told["experts"]), close)
    return {key: routed for key, (_, routed) in newest.items()}


def parting(one: Mapping[Key, Routed], other: Mapping[Key, Routed], iterations: int) -> tuple[Choice, ...]:
    """Returns the choices that make two runs diverge: the different choices of the first iteration that has any.

    For each micro batch, only the first layer that differs is used, since later layers have different input.

    Args:
        one: routing of the first run.
        other: routing of the second run.
        iterations: number of iterations that are compared.

    Raises:
        KeyError: only one run has recorded a micro batch.
    """
    keys = sorted(key for key in one.keys() | other.keys() if key[0] <= iterations)
    found, seen = list[Choice](), set[int]()
    for iteration, micro_batch, layer in keys:
        if found and iteration > found[0].iteration:
            break
        mine, theirs = one[iteration, micro_batch, layer], other[iteration, micro_batch, layer]
        if micro_batch not in seen and mine.experts != theirs.experts:
            seen.add(micro_batch)
            found += [
                Choice(iteration, micro_batch, layer, token, (_margin(mine, token), _margin(theirs, token)))
                for token, experts in enumerate(mine.experts)
                if experts != theirs.experts[token]
            ]
    return tuple(found)


def decided(choices: Iterable[Choice], margin: float) -> list[Choice]:
    """Returns choices that rounding does not explain: at least one run's margin exceeds ``margin``."""
    return [choice for choice in choices if max(choice.margins) > margin]


def _margin(routed: Routed, token: int) -> float:
    return routed.close.get(token, float("inf"))
