"""Draws the loss curves of one or more runs from their events.jsonl."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moc.cli_output import Parser, ToolError, escapes_output, print_lines, refused
from moc.files.decode import escape_line
from moc.files.event_log import events_file, losses_of, read_events
from moc.plots import MARKS_PAD, LossMark, add_legend, add_marks, distinct_names, drawings, ink
from moc.simulate.profile import ByIteration

EXTRA_FIELDS = {"learning-rate": "learning_rate", "grad-norm": "grad_norm"}

EPILOG = """\
examples:
  python tools/plot_loss.py --log-dir logs/run1 --output loss.png
  python tools/plot_loss.py logs/a/events.jsonl logs/b/events.jsonl --start 100 \\
      --extra learning-rate grad-norm

The thin line is the training loss of each iteration, the thick one their moving average, dots are the
validation loss; dashed lines mark where a run resumed, and why. NAME_dark.png is the same for dark pages."""


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
        draw_loss_curves(args.output, runs, args.title, args.smoothing, args.extra)
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

    directory: Path
    training: ByIteration[Mapping] = field(default_factory=ByIteration)
    """Events of type "iteration"."""
    validation: ByIteration[float] = field(default_factory=ByIteration)
    resumed: list[LossMark] = field(default_factory=list)
    """Where the run resumed, and after which loss."""
    _time: float = 0.0  # of the newest iteration
    _loss_reason: str = ""  # reason of the newest loss, until the run resumes

    def select_iterations(self, start: int, end: int | None) -> LossCurve:
        """Returns the part of the run from iteration `start` to `end`, inclusive; None is the run's own end."""
        stop = math.inf if end is None else end
        return LossCurve(
            self.directory,
            ByIteration((i, event) for i, event in self.training.items() if start <= i <= stop),
            ByIteration((i, loss) for i, loss in self.validation.items() if start <= i <= stop),
            [mark for mark in self.resumed if start <= mark.at <= stop],
        )

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Returns iterations and values of one field of the iteration events, without missing and non-finite values."""
        iterations = [i for i in sorted(self.training) if _is_finite(self.training[i].get(key))]
        return iterations, [self.training[i][key] for i in iterations]

    def add(self, event: Mapping) -> None:
        """Adds the next event; iterations repeated by a resumed run replace the earlier ones."""
        kind, iteration = event.get("type"), event.get("iteration")
        if kind == "generation":
            self._loss_reason = "; ".join(dict.fromkeys(loss.title for loss in losses_of(event)))
        if not isinstance(iteration, int):
            return
        if kind == "iteration":
            self._time = event.get("time", 0.0)
        if kind == "start":
            self._discard_after(iteration, event.get("time", 0.0) - self._time)
        elif kind == "iteration" and not event.get("skipped"):
            self.training[iteration] = event
        elif kind == "iteration":
            self.training.pop(iteration, None)
        elif kind == "evaluation" and event.get("split", "valid") == "valid" and _is_finite(event.get("loss")):
            self.validation[iteration] = event["loss"]

    def _discard_after(self, iteration: int, dead_s: float) -> None:
        # iterations after the checkpoint are undone, even if the resumed run has not reached them yet
        self.training.undo(iteration)
        self.validation.undo(iteration)
        while self.resumed and self.resumed[-1].at > iteration:
            self.resumed.pop()
        if iteration > 0:
            self.resumed.append(LossMark(iteration, self._loss_reason or "restarted", max(0.0, dead_s), iteration))
        self._loss_reason = ""


def _is_finite(value) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def read_loss_curve(path: Path) -> LossCurve:
    """Reads an events.jsonl, whose directory names the run; raises OSError and ValueError as :func:`read_events`."""
    run = LossCurve(path.absolute().parent)
    for event in read_events(path):
        run.add(event)
    return run


def smooth(values: list[float], width: int) -> list[float]:
    """Returns the moving average with `width` neighbours on each side, for values that have as many.

    The result has `2 * width` values less: an average of fewer values would bend at the ends.
    """
    sums, count = [0.0, *itertools.accumulate(values)], 2 * width + 1
    return [(sums[begin + count] - sums[begin]) / count for begin in range(len(values) - count + 1)]


def draw_loss_curves(path: str, runs: list[LossCurve], title: str, smoothing: int, extra: list[str]) -> None:
    """Draws the runs, one colour each, with up to two keys of `EXTRA` in a second panel, as a PNG and its dark twin."""
    if smoothing < 0:
        raise ToolError("--smoothing is negative. Fix: pass 0 or more", code="value-out-of-range")
    heights = [3, 1] if extra else [1]
    options: dict[str, Any] = dict(sharex=True, figsize=(9, 7.5 if extra else 5.5), height_ratios=heights)
    names = distinct_names([run.directory for run in runs])
    for _, panels in drawings(path, len(heights), **options):
        draw_losses(panels[0, 0], dict(zip(names, runs, strict=True)), title, smoothing)
        if extra:
            _draw_extra(panels[1, 0], runs, extra)
        panels[-1, 0].set_xlabel("iteration")
        add_legend(panels[0, 0])


def draw_losses(panel, runs: Mapping[str, LossCurve], title: str, smoothing: int) -> None:
    """Draws training and validation losses of runs by name, and marks where they resumed."""
    for number, (name, run) in enumerate(runs.items()):
        _draw_loss(panel, run, f"C{number}", smoothing, f"{name}, " if len(runs) > 1 else "")
    for number, run in enumerate(runs.values()):
        add_marks(panel, run.resumed, f"C{number}" if len(runs) > 1 else ink())
    shown_title = escape_line(title) or f"Loss of {', '.join(runs)}"
    panel.set_title(shown_title, pad=MARKS_PAD if any(run.resumed for run in runs.values()) else None)
    panel.set_ylabel("loss, nats per token")


def _draw_loss(panel, run: LossCurve, color: str, smoothing: int, name: str) -> None:
    iterations, losses = run.series("loss")
    width = min(smoothing, (len(losses) - 1) // 8)
    if width > 0:
        panel.plot(iterations, losses, color=color, linewidth=0.6, alpha=0.45, label=f"{name}training")
        label = f"{name}mean of {2 * width + 1} iterations"
        panel.plot(iterations[width:-width], smooth(losses, width), color=color, linewidth=1.8, label=label)
    else:
        panel.plot(iterations, losses, color=color, linewidth=1, label=f"{name}training")
    if run.validation:
        points = sorted(run.validation.items())
        style = {"marker": "o", "markersize": 5, "markeredgecolor": ink(), "linestyle": "none"}
        panel.plot(*zip(*points, strict=True), color=color, label=f"{name}validation", **style)


def _draw_extra(panel, runs: list[LossCurve], extra: list[str]) -> None:
    axes = [panel, panel.twinx()] if len(extra) > 1 else [panel]
    for axis, name, style in zip(axes, extra, ("-", ":"), strict=False):
        for number, run in enumerate(runs):
            axis.plot(*run.series(EXTRA_FIELDS[name]), style, color=f"C{number}", linewidth=1)
        axis.set_ylabel(f"{name.replace('-', ' ')} ({'dotted' if style == ':' else 'line'})")
