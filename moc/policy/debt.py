"""Tokens that experts lost to a recovery, made up by more capacity afterwards (MoEtion, section 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from moc.files.decode import Count

Table = tuple[tuple[Count, ...], ...]
"""Tokens by index of the layer among those with experts, and by expert."""


class Boost(NamedTuple):
    """More capacity for experts that lost tokens: by this fraction, for at most so many iterations."""

    fraction: float
    iterations: int


@dataclass(frozen=True)
class Debt:
    """Tokens that experts are to make up; immutable, identical on every rank.

    Attributes:
        tokens: to make up.
        made_up: of them so far: tokens processed beyond capacity.
        left: iterations left to make them up; 0 once all are made up.
    """

    tokens: Table
    made_up: Table
    left: Count

    @classmethod
    def of(cls, lost: Sequence[Sequence[int]], iterations: int, before: Debt | None = None) -> Debt | None:
        """The debt after a recovery: the tokens lost, and those still owed from before.

        Args:
            lost: to this recovery; negative where a newer state than before was found.
            iterations: given to make tokens up, counted anew if any were lost.
            before: debt of the iteration from which the run resumes; continues unchanged if nothing was lost.
        """
        if not any(map(any, lost)):
            return before
        owed = _summed(before.owed, lost) if before is not None else lost
        tokens = tuple(tuple(max(0, number) for number in row) for row in owed)
        return cls(tokens, _zeros(lost), iterations if any(map(any, tokens)) else 0)

    @property
    def owed(self) -> Table:
        """Tokens not made up yet; 0 when the iterations for it are over."""
        pairs = zip(self.tokens, self.made_up, strict=True)
        return tuple(tuple(max(0, t - m) * bool(self.left) for t, m in zip(*rows, strict=True)) for rows in pairs)

    @property
    def totals(self) -> tuple[int, int]:
        """Tokens to make up over all experts, and those of them that are made up."""
        pairs = [pair for rows in zip(self.tokens, self.made_up, strict=True) for pair in zip(*rows, strict=True)]
        return sum(tokens for tokens, _ in pairs), sum(map(min, pairs))

    def after(self, beyond: Sequence[Sequence[int]]) -> Debt:
        """The debt after one more iteration, in which experts processed these tokens beyond their capacity."""
        now = replace(self, made_up=_summed(self.made_up, beyond), left=max(0, self.left - 1))
        return now if any(map(any, now.owed)) else replace(now, left=0)


def _summed(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> Table:
    return tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in zip(one, other, strict=True))


def _zeros(like: Sequence[Sequence[int]]) -> Table:
    return tuple((0,) * len(row) for row in like)
