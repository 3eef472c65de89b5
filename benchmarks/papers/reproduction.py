"""Compares a table or figure of a paper with our results."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

COMMON_LAW = "at random at the MTBF that is named, during recoveries too"
"""Failure law under which all tables are also computed, in addition to the law that fits each paper best."""

_HOLDS = {"least": operator.ge, "most": operator.le, "above": operator.gt}


@dataclass(frozen=True)
class Row:
    """Figure of a table.

    Attributes:
        bound: ``least``, ``most`` or ``above`` if the paper states only a bound; such a row holds or fails, and has no
            error.
    """

    label: str  # description
    paper: float  # as printed
    ours: float  # computed
    kind: str = "ettr"  # ``ettr`` and ``percent``: difference in points; ``factor``: larger divided by smaller
    bound: str = ""
    excluded: str = ""  # reason not to count it: damaged in print, used for a fit, or unable to fail
    common: float | None = None  # ours under the common law of failures; None without failures

    @property
    def error(self) -> float:
        """Error in points, or as a factor of at least 1."""
        return self._error(self.ours)

    @property
    def holds(self) -> bool:
        """Whether our value is on the bound's side of the paper's."""
        return self._holds(self.ours)

    def errors(self, common: bool = False) -> list[float]:
        """Returns the absolute error of our value, or of the common law's; empty for a bound or an excluded row."""
        return [abs(self._error(ours)) for ours in self._counted(common) if not self.bound]

    def bounds(self, common: bool = False) -> list[bool]:
        """Returns whether the bound holds; empty if the row is excluded or no bound."""
        return [self._holds(ours) for ours in self._counted(common) if self.bound]

    def _counted(self, common: bool) -> list[float]:
        ours = self.common if common else self.ours
        return [] if self.excluded or ours is None else [ours]

    def _holds(self, ours: float) -> bool:
        return _HOLDS[self.bound](ours, self.paper)

    def cells(self, common: bool) -> list[str]:
        """Returns a line of the table, with or without columns for the common law."""
        figure = "{:.3f}" if self.kind == "ettr" else "{:.4g}"
        label = f"{self.label}, {'' if self.bound == 'above' else 'at '}{self.bound}" if self.bound else self.label
        cells = [label, figure.format(self.paper), figure.format(self.ours), self._told(self.ours)]
        if common:
            cells += ["", ""] if self.common is None else [figure.format(self.common), self._told(self.common)]
        return cells

    def _told(self, ours: float) -> str:
        if self.bound:
            told = "holds" if self._holds(ours) else "fails"
        else:
            told = f"x {self._error(ours):.2f}" if self.kind == "factor" else f"{self._error(ours):+.1f}"
        return f"({told})" if self.excluded else told

    def _error(self, ours: float) -> float:
        if self.kind == "factor":
            return max(ours / self.paper, self.paper / ours)
        return (ours - self.paper) * (100 if self.kind == "ettr" else 1)


@dataclass(frozen=True)
class Reproduction:
    """Reproduced table or figure."""

    title: str  # paper and figure
    rows: tuple[Row, ...]  # one row per figure
    notes: tuple[str, ...]  # inputs, and printed figures that are not used
    law: str = "none"  # distribution of failures chosen for this paper
    fitted: tuple[str, ...] = ()  # constants fitted to the paper's figures, or chosen if it states none
    order_right: tuple[int, int] | None = None  # cells with the systems in the paper's order, and all cells
    common_order: tuple[int, int] | None = None  # the same under the common law

    @property
    def has_common(self) -> bool:
        """Whether the result depends on failures, so that the common law applies."""
        return any(row.common is not None for row in self.rows)

    def summary(self) -> tuple[str, ...]:
        """Returns the headlines: failure law, errors of the rows that could fail, and every fitted constant."""
        lines = [f"Failures: {self.law}.", self._headline(common=False, order=self.order_right)]
        if self.has_common:
            lines.append(f"Under the common law ({COMMON_LAW}):")
            lines.append(self._headline(common=True, order=self.common_order))
        left = [row.excluded for row in self.rows if row.excluded]
        if left:
            counts = ", ".join(f"{left.count(why)} {why}" for why in dict.fromkeys(left))
            lines.append(f"In brackets, and not counted: {counts}.")
        lines.append(f"Fitted or chosen: {'; '.join(self.fitted) or 'nothing'}.")
        return tuple(lines)

    def _headline(self, common: bool, order: tuple[int, int] | None) -> str:
        parts = [*self._errors(common), *self._bounds(common)]
        if order:
            parts.append("order of the systems right in {} of {} cells".format(*order))
        return "; ".join(parts) + "." if parts else "Nothing here could fail."

    def _errors(self, common: bool) -> Iterator[str]:
        points = [error for row in self.rows if row.kind != "factor" for error in row.errors(common)]
        factors = [error for row in self.rows if row.kind == "factor" for error in row.errors(common)]
        if points:
            yield f"mean absolute error {fmean(points):.1f} points, worst {max(points):.1f}, of {len(points)} figures"
        if factors:
            yield f"factors up to {max(factors):.2f}, of {len(factors)}"

    def _bounds(self, common: bool) -> Iterator[str]:
        bounds = [holds for row in self.rows for holds in row.bounds(common)]
        if bounds:
            yield f"{sum(bounds)} of {len(bounds)} bounds hold, which have no error"
