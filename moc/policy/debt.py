"""Tracks tokens that experts lost to a recovery and process later with extra capacity (MoEtion, section 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from moc.files.decode import Count

Table = tuple[tuple[Count, ...], ...]
"""Tokens by index of the layer among layers with experts, and by expert."""


class Boost(NamedTuple):
    """Capacity boost of experts that lost tokens, as a fraction, for at most ``iterations`` iterations."""

    fraction: float
    iterations: int


@dataclass(frozen=True)
class Debt:
    """Tokens that experts must compensate; immutable, identical on every rank.

    Attributes:
        tokens: tokens to compensate.
        made_up: tokens compensated so far: processed beyond capacity.
        left: iterations left; 0 once all tokens are compensated.
    """

    tokens: Table
    made_up: Table
    left: Count

    @classmethod
    def of(cls, lost: Sequence[Sequence[int]], iterations: int, before: Debt | None = None) -> Debt | None:
        """Returns the debt after a recovery: its lost tokens, and tokens still owed from before.

        Args:
            lost: tokens lost to this recovery; negative where a newer state than before was found.
            iterations: iterations for compensation; they restart if any tokens were lost.
            before: debt of the iteration from which the run resumes; continues unchanged if nothing was lost.
        """
        if not any(map(any, lost)):
            return before
        owed = _summed(before.owed, lost) if before is not None else lost
        tokens = tuple(tuple(max(0, number) for number in row) for row in owed)
        return cls(tokens, _zeros(lost), iterations if any(map(any, tokens)) else 0)

    @property
    def owed(self) -> Table:
        """Tokens not compensated yet; 0 when the iterations are over."""
        pairs = zip(self.tokens, self.made_up, strict=True)
        return tuple(tuple(max(0, t - m) * bool(self.left) for t, m in zip(*rows, strict=True)) for rows in pairs)

    @property
    def totals(self) -> tuple[int, int]:
        """Tokens to compensate over all experts, and how many of them are compensated."""
        pairs = [pair for rows in zip(self.tokens, self.made_up, strict=True) for pair in zip(*rows, strict=True)]
        return sum(tokens for tokens, _ in pairs), sum(map(min, pairs))

    def after(self, beyond: Sequence[Sequence[int]]) -> Debt:
        """Returns the debt after one more iteration, in which experts processed these tokens beyond their capacity."""
        now = replace(self, made_up=_summed(self.made_up, beyond), left=max(0, self.left - 1))
        return now if any(map(any, now.owed)) else replace(now, left=0)


def _summed(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> Table:
    return tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in zip(one, other, strict=True))


def _zeros(like: Sequence[Sequence[int]]) -> Table:
    return tuple((0,) * len(row) for row in like)
