"""A table or figure of a paper beside ours."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Row:
    """A figure.

    Attributes:
        label: what it is of.
        paper: as printed.
        ours: computed.
        kind: ``ettr`` and ``percent`` differ by points; of a ``factor`` the larger by the smaller counts.
        bound: ``least`` or ``most`` where the paper says that it is at least or at most so much.
        counted: it is in the mean; otherwise what is printed is damaged.
    """

    label: str
    paper: float
    ours: float
    kind: str = "ettr"
    bound: str = ""
    counted: bool = True

    @property
    def error(self) -> float:
        """In points, or as a factor from 1 on."""
        if self.kind == "factor":
            return max(self.ours / self.paper, self.paper / self.ours)
        points = (self.ours - self.paper) * (100 if self.kind == "ettr" else 1)
        return {"": points, "least": min(0.0, points), "most": max(0.0, points)}[self.bound]

    def cells(self) -> list[str]:
        """A line of the table."""
        figure = "{:.3f}" if self.kind == "ettr" else "{:.4g}"
        error = f"x {self.error:.2f}" if self.kind == "factor" else f"{self.error:+.1f}"
        label = f"{self.label}, at {self.bound}" if self.bound else self.label
        return [label, figure.format(self.paper), figure.format(self.ours), error if self.counted else f"({error})"]


@dataclass(frozen=True)
class Reproduction:
    """A table or figure.

    Attributes:
        title: whose.
        rows: figure by figure.
        notes: inputs, what was calibrated, and what of the printed figures is not used.
        order_right: cells in which the systems come in the paper's order, and how many cells there are.
    """

    title: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    order_right: tuple[int, int] | None = None

    def errors(self, *kinds: str) -> list[float]:
        """Absolute errors of the rows that count."""
        return [abs(row.error) for row in self.rows if row.counted and row.kind in kinds]

    def summary(self) -> str:
        """The errors in one sentence."""
        points, factors = self.errors("ettr", "percent"), self.errors("factor")
        parts = []
        if points:
            parts.append(f"mean absolute error {fmean(points):.1f} points, worst {max(points):.1f}, of {len(points)}")
        if factors:
            parts.append(f"factors up to {max(factors):.2f}, of {len(factors)}")
        if self.order_right:
            parts.append("order of the systems right in {} of {} cells".format(*self.order_right))
        return "; ".join(parts) + "."
