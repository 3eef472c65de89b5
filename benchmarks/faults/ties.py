"""Tokens that two runs send to different experts, and whether a router liked those equally well; pure but for reading.

Two runs of an elastic job with other members add the same numbers in other groups, so that logits differ by rounding.
Where the last expert that a token is sent to is as good as the next one, rounding decides, and from then on the runs
train something else.  Whoever compares their losses must know of it.
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
    """Where the tokens of a micro batch went in a layer.

    Attributes:
        experts: of each token.
        close: by token, how far its last expert's logit was above that of the next one, if it was close.
    """

    experts: tuple[str, ...]
    close: Mapping[int, float]


@dataclass(frozen=True)
class Choice:
    """A token that two runs send to different experts; each margin is infinite where the choice was not close."""

    iteration: int
    micro_batch: int
    layer: int
    token: int
    margins: tuple[float, float]


def read(directory: Path) -> dict[Key, Routed]:
    """What all workers of a run have told (benchmarks/live/routing.py): of what was computed again, the newest."""
    newest: dict[Key, tuple[float, Routed]] = {}
    for path in directory.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            with suppress(ValueError):  # of a worker that was killed
                told = json.loads(line)
                key = told["iteration"], told["micro_batch"], told["layer"]
                close = {int(token): margin for token, margin in told["close"].items()}
                if key not in newest or newest[key][0] < told["time"]:
                    newest[key] = told["time"], Routed(tuple(told["experts"]), close)
    return {key: routed for key, (_, routed) in newest.items()}


def parting(one: Mapping[Key, Routed], other: Mapping[Key, Routed], iterations: int) -> tuple[Choice, ...]:
    """The choices with which two runs part: those of the first iteration in which any differ.

    Of each micro batch, those of the first layer in which it differs: later layers get another input.

    Args:
        one: of the first run.
        other: of the second one.
        iterations: of both that are compared.

    Raises:
        KeyError: one run tells of a micro batch that the other one does not.
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
    """Choices that are none of rounding: in one of the runs at least, the experts were farther apart than that."""
    return [choice for choice in choices if max(choice.margins) > margin]


def _margin(routed: Routed, token: int) -> float:
    return routed.close.get(token, float("inf"))
