"""Draws all pictures of this project in one style: light and dark, legends outside of the data, labelled marks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moc.cli_output import replacing
from moc.files.decode import escape_line

THEMES = {
    "light": dict(
        paper="white", ink="#1f2328", faint="#d0d7de",
        colors="#0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9 #7f7f7f #8b5a2b #6a3d9a #a3a800",
    ),
    "dark": dict(
        paper="#0d1117", ink="#e6edf3", faint="#3d444d",
        colors="#56b4e9 #f0883e #3fb98a #e29bc4 #f0d442 #6f9bff #a0a0a0 #c49a6c #b39ddb #d6d65c",
    ),
}  # fmt: skip
"""Colours by theme.  Colour-blind readers can distinguish the colours of series (Okabe and Ito)."""

MARKS_PAD = 32
"""Points between a panel with marks and its title, for their labels."""

_LEGEND_PT = 40  # points from a panel to its legend, for the labels of the axis
_CLOSE = 0.15  # of a panel's width: closer marks share one label
_DPI = 120


@dataclass(frozen=True)
class LossMark:
    """A loss after which a run resumed.

    Attributes:
        at: position on the horizontal axis.
        what: label, such as ``worker 2 killed``.
        dead_s: seconds without useful work.
        begin: where the time without useful work begins; equal to ``at`` if the axis is no time.
    """

    at: float
    what: str
    dead_s: float
    begin: float


def theme_path(path: str | Path, theme: str) -> Path:
    """Returns the path of a picture in a theme: ``loss.png``, or ``loss_dark.png``."""
    path = Path(path)
    return path if theme == "light" else path.with_stem(f"{path.stem}_{theme}")


def drawings(path: str | Path, rows: int = 1, columns: int = 1, dpi: int = _DPI, **options: Any) -> Iterator[Any]:
    """Yields a figure and its 2-d array of panels for each theme; writes each as PNG once its body has drawn it.

    Args:
        path: file of the light picture; the dark one has the suffix ``_dark``.
        rows: rows of panels.
        columns: columns of panels.
        dpi: pixels per inch.
        options: goes to :func:`matplotlib.pyplot.subplots`.

    Raises:
        OSError: a file cannot be written.
    """
    for theme in THEMES:
        with styled(theme) as pyplot:
            figure, panels = pyplot.subplots(rows, columns, squeeze=False, **{"layout": "constrained"} | options)
            try:
                yield figure, panels
                with replacing(theme_path(path, theme)) as name:
                    figure.savefig(name, format="png", dpi=dpi)
            finally:
                pyplot.close(figure)


@contextmanager
def styled(theme: str = "light") -> Iterator[Any]:
    """Yields matplotlib's ``pyplot`` for files, with a theme's settings; text between dollars is not parsed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(_settings(theme)):
        yield pyplot


def _settings(theme: str) -> Any:
    from cycler import cycler

    colors = THEMES[theme]
    ink, paper, faint = colors["ink"], colors["paper"], colors["faint"]
    return {
        "text.parse_math": False,
        "axes.prop_cycle": cycler(color=colors["colors"].split()),
        "figure.facecolor": paper,
        "axes.facecolor": paper,
        "savefig.facecolor": paper,
        "text.color": ink,
        "axes.edgecolor": ink,
        "axes.labelcolor": ink,
        "axes.titlecolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "grid.color": faint,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": "medium",
        "axes.titlelocation": "left",
        "legend.frameon": False,
        "legend.fontsize": "small",
        "font.size": 10.0,
    }


def ink() -> str:
    """Returns the theme's colour of text."""
    return _current("text.color")


def faint() -> str:
    """Returns the theme's colour of secondary marks."""
    return _current("grid.color")


def paper() -> str:
    """Returns the theme's background."""
    return _current("axes.facecolor")


def _current(name: Any) -> Any:
    import matplotlib

    return matplotlib.rcParams[name]


def add_legend(panel: Any, title: str | None = None, columns: int = 3) -> None:
    """Adds a legend below a panel, where it covers no data; none without labels."""
    if panel.get_legend_handles_labels()[1]:
        from matplotlib.transforms import ScaledTranslation

        below_axis = panel.transAxes + ScaledTranslation(0, -_LEGEND_PT / 72, panel.figure.dpi_scale_trans)
        position = dict(loc="upper center", bbox_to_anchor=(0.5, 0.0), bbox_transform=below_axis, borderaxespad=0.0)
        panel.legend(ncols=columns, title=title, title_fontsize="small", **position)


def add_marks(panel: Any, marks: Iterable[LossMark], color: str) -> None:
    """Adds vertical lines with labels above the panel, and areas of dead time; close marks share one label.

    The limits of the horizontal axis must be set or follow from data that were drawn before.
    """
    left, right = panel.get_xlim()
    groups: list[list[LossMark]] = []
    for mark in sorted(marks, key=lambda mark: mark.at):
        panel.axvline(mark.at, color=color, linewidth=0.9, linestyle="--", zorder=0)
        if mark.begin < mark.at:
            panel.axvspan(mark.begin, mark.at, color=color, alpha=0.18, linewidth=0, zorder=0)
        if groups and mark.at - groups[-1][0].at < _CLOSE * (right - left):
            groups[-1].append(mark)
        else:
            groups.append([mark])
    for group in groups:
        cause = escape_line(group[0].what) if len(group) == 1 else f"{len(group)} losses"
        text = f"{cause}\nresumed after {sum(mark.dead_s for mark in group):.3g} s"
        share = (group[0].at - left) / ((right - left) or 1.0)
        side = "left" if share < 0.1 else "right" if share > 0.9 else "center"
        position = dict(xycoords=panel.get_xaxis_transform(), xytext=(0, 3), textcoords="offset points")
        style = dict(ha=side, va="bottom", fontsize="x-small", color=color)
        panel.annotate(text, (group[0].at, 1.0), **position, **style, annotation_clip=False)
    panel.set_xlim(left, right)


def distinct_names(paths: Sequence[str | Path]) -> list[str]:
    """Returns a short name for each path: its last parts that distinguish it, and a number for equal paths."""
    parts = [Path(path).parts for path in paths]
    for count in itertools.count(1 if all(part[-1:] != ("log",) for part in parts) else 2):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            break
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = seen.get(name, 0) + 1
    numbers = {name: itertools.count(1) for name in seen}
    numbered = (name if seen[name] == 1 else f"{name} ({next(numbers[name])})" for name in names)
    return [escape_line(name) for name in numbered]  # matplotlib refuses names that are not UTF-8
