"""Draws the loss curves of one or more runs from their events.jsonl."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moc.cli_output import Parser, ToolError, escapes_output, print_lines, pyplot, refused, replacing
from moc.files.event_log import events_file, read_events
from moc.simulate.profile import ByIteration

EXTRA_FIELDS = {"learning-rate": "learning_rate", "grad-norm": "grad_norm"}
RESUME_COLOR = "0.75"

EPILOG = """\
examples:
  python tools/plot_loss.py --log-dir logs/run1 --output loss.png
  python tools/plot_loss.py logs/a/events.jsonl logs/b/events.jsonl --start 100 \\
      --extra learning-rate grad-norm

The thin line is the training loss of each iteration, the thick one their moving average, dots are the
validation loss; a light vertical line marks where a run was resumed."""


def build_parser() -> argparse.ArgumentParser:
    """Builds the command line parser."""
    parser = Parser(
        description="Draw training and validation loss over iterations as a PNG.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("events", nargs="*", metavar="EVENTS", help="events.jsonl files, or directories with one")
    parser.add_argument("--log-dir", action="append", default=[], metavar="DIR", help="the run's --log-dir")
    parser.add_argument("--output", default="loss.png", metavar="PNG", help="(default: %(default)s)")
    parser.add_argument("--title", default="", help="above the picture")
    parser.add_argument("--start", type=int, default=0, metavar="ITERATION", help="first iteration to draw")
    parser.add_argument("--end", type=int, metavar="ITERATION", help="last iteration to draw")
    parser.add_argument(
        "--smoothing",
        type=int,
        default=10,
        metavar="N",
        help="average over N iterations on each side, 0 for no average (default: %(default)s)",
    )
    parser.add_argument("--extra", nargs="+", choices=list(EXTRA_FIELDS), default=[], help="values of a second panel")
    return parser


@escapes_output
def main(argv: list[str] | None = None) -> int:
    """Runs the tool; returns the exit status: 0, or 1 on an error."""
    args = build_parser().parse_args(argv)
    try:
        runs = [read_loss_curve(path) for path in _event_files(args)]
        runs = [run.select_iterations(args.start, args.end) for run in runs]
        if not any(run.training or run.validation for run in runs):
            raise ToolError(
                "there is no loss to draw in these events. Fix: give events of a run that has trained",
                code="run-too-short",
            )
        figure = draw_loss_curves(runs, args.title, args.smoothing, args.extra)
        with replacing(args.output) as name:
            figure.savefig(name, format="png", dpi=120)
    except (ToolError, ValueError, OSError) as error:
        return refused("plot_loss", error, args.output)
    points = sum(len(run.training) for run in runs)
    print_lines(f"wrote {args.output} ({points:,} iterations of {len(runs)} run{'s' if len(runs) > 1 else ''})")
    return 0


def _event_files(args: argparse.Namespace) -> list[Path]:
    paths = [Path(name) for name in (*args.events, *args.log_dir)]
    if not paths:
        raise ToolError(
            "there is no file of events to draw. Fix: give an events.jsonl, or --log-dir",
            code="input-missing",
        )
    return [events_file(path) for path in paths]


@dataclass
class LossCurve:
    """Contents of one events.jsonl, by iteration."""

    name: str
    training: ByIteration[Mapping] = field(default_factory=ByIteration)
    """Events of type "iteration"."""
    validation: ByIteration[float] = field(default_factory=ByIteration)
    resumed_at: list[int] = field(default_factory=list)

    def select_iterations(self, start: int, end: int | None) -> LossCurve:
        """Returns the part of the run from iteration `start` to `end`, inclusive; None is the run's own end."""
        stop = math.inf if end is None else end
        return LossCurve(
            self.name,
            ByIteration((i, event) for i, event in self.training.items() if start <= i <= stop),
            ByIteration((i, loss) for i, loss in self.validation.items() if start <= i <= stop),
            [i for i in self.resumed_at if start <= i <= stop],
        )

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Returns iterations and values of one field of the iteration events, without missing and non-finite values."""
        iterations = [i for i in sorted(self.training) if _is_finite(self.training[i].get(key))]
        return iterations, [self.training[i][key] for i in iterations]

    def add(self, event: Mapping) -> None:
        """Adds the next event; iterations repeated by a resumed run replace the earlier ones."""
        kind, iteration = event.get("type"), event.get("iteration")
        if not isinstance(iteration, int):
            return
        if kind == "start":
            self._discard_after(iteration)
        elif kind == "iteration" and not event.get("skipped"):
            self.training[iteration] = event
        elif kind == "iteration":
            self.training.pop(iteration, None)
        elif kind == "evaluation" and event.get("split", "valid") == "valid" and _is_finite(event.get("loss")):
            self.validation[iteration] = event["loss"]

    def _discard_after(self, iteration: int) -> None:
        # iterations after the checkpoint are undone, even if the resumed run has not reached them yet
        self.training.undo(iteration)
        self.validation.undo(iteration)
        while self.resumed_at and self.resumed_at[-1] > iteration:
            self.resumed_at.pop()
        if iteration > 0:
            self.resumed_at.append(iteration)


def _is_finite(value) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def read_loss_curve(path: Path) -> LossCurve:
    """Reads an events.jsonl, whose directory names the run; raises OSError and ValueError as :func:`read_events`."""
    run = LossCurve(path.absolute().parent.name)
    for event in read_events(path):
        run.add(event)
    return run


def smooth(values: list[float], width: int) -> list[float]:
    """Returns the moving average with up to `width` neighbours on each side; fewer, symmetrically, near the ends."""
    sums = [0.0, *itertools.accumulate(values)]
    means = []
    for i in range(len(values)):
        near = min(width, i, len(values) - 1 - i)
        means.append((sums[i + near + 1] - sums[i - near]) / (2 * near + 1))
    return means


def draw_loss_curves(runs: list[LossCurve], title: str, smoothing: int, extra: list[str]):
    """Draws the runs, one colour each, with up to two keys of `EXTRA` in a second panel; returns the figure."""
    if smoothing < 0:
        raise ToolError("--smoothing is negative. Fix: pass 0 or more", code="value-out-of-range")
    heights = [3, 1] if extra else [1]
    figure, panels = pyplot().subplots(
        len(heights),
        sharex=True,
        squeeze=False,
        figsize=(9, 7 if extra else 5),
        height_ratios=heights,
        layout="constrained",
    )
    for number, run in enumerate(runs):
        _draw_loss(panels[0, 0], run, f"C{number}", smoothing, run.name if len(runs) > 1 else "")
    panels[0, 0].set(ylabel="loss", title=title)
    panels[0, 0].legend()
    if extra:
        _draw_extra(panels[1, 0], runs, extra)
    for panel in panels[:, 0]:
        panel.grid(alpha=0.3)
        resumed = sorted({i for run in runs for i in run.resumed_at})
        panel.vlines(resumed, 0, 1, transform=panel.get_xaxis_transform(), color=RESUME_COLOR, linewidth=1, zorder=0)
    panels[-1, 0].set_xlabel("iteration")
    return figure


def _draw_loss(panel, run: LossCurve, color: str, smoothing: int, name: str) -> None:
    label = f"{name} training" if name else "training"
    iterations, losses = run.series("loss")
    raw = {"linewidth": 0.6, "alpha": 0.45} if smoothing else {"linewidth": 1, "label": label}
    panel.plot(iterations, losses, color=color, **raw)
    if smoothing:
        panel.plot(iterations, smooth(losses, smoothing), color=color, linewidth=1.8, label=label)
    if run.validation:
        points = sorted(run.validation.items())
        style = {"marker": "o", "markersize": 5, "markeredgecolor": "black", "linestyle": "none"}
        panel.plot(*zip(*points, strict=True), color=color, label=label.replace("training", "validation"), **style)


def _draw_extra(panel, runs: list[LossCurve], extra: list[str]) -> None:
    axes = [panel, panel.twinx()] if len(extra) > 1 else [panel]
    for axis, name, style in zip(axes, extra, ("-", ":"), strict=False):
        for number, run in enumerate(runs):
            axis.plot(*run.series(EXTRA_FIELDS[name]), style, color=f"C{number}", linewidth=1)
        axis.set_ylabel(f"{name.replace('-', ' ')} ({'dotted' if style == ':' else 'line'})")
