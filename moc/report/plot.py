"""Draws a report: progress of runs, uses of their time, and imbalance of experts."""

from __future__ import annotations

from collections.abc import Sequence

from moc.output import pyplot, replacing
from moc.report.clock import Event
from moc.report.figures import Report
from moc.report.tables import PARTS


def plot(path: str, runs: Sequence[Report], events: Sequence[Sequence[Event]]) -> None:
    """Draws runs, with the events of each, into a PNG; replaces it atomically."""
    varies = any(len({period.workers for period in run.periods}) > 1 for run in runs)
    panels = [_progress, *([_workers] if varies else []), _parts]
    panels += [_skewness] if any("skewness" in run.gauges for run in runs) else []
    plots = pyplot()
    figure, axes = plots.subplots(len(panels), figsize=(9, 3.2 * len(panels)), layout="constrained", squeeze=False)
    try:
        for panel, draw in zip(axes[:, 0], panels, strict=True):
            draw(panel, runs, events)
        with replacing(path) as name:
            figure.savefig(name, format="png", dpi=120)
    finally:
        plots.close(figure)


def _progress(panel, runs: Sequence[Report], events: Sequence[Sequence[Event]]) -> None:
    for number, (run, told) in enumerate(zip(runs, events, strict=True)):
        trained = [event for event in told if event["type"] == "iteration"]
        times, iterations = zip(*((e["time"] - run.began, e["iteration"]) for e in trained), strict=True)
        panel.plot(times, iterations, color=f"C{number}", label=f"{run.name} (ETTR {run.ettr:.3f})")
        for recovery in run.each:
            panel.axvline(recovery.time - run.began, color=f"C{number}", linewidth=0.8, linestyle=":")
    panel.set(xlabel="seconds since the begin; dotted: after a recovery", ylabel="iteration")
    panel.grid(alpha=0.3)
    panel.legend(loc="upper left")


def _workers(panel, runs: Sequence[Report], events: Sequence[Sequence[Event]]) -> None:
    for number, run in enumerate(runs):
        edges = [(edge, one.workers) for one in run.periods for edge in (one.began_s, one.ended_s)]
        panel.plot(*zip(*edges, strict=True), color=f"C{number}", linewidth=0.8, linestyle=":")
        for one in run.periods:
            panel.plot((one.began_s, one.ended_s), (one.workers, one.workers), color=f"C{number}", linewidth=2.5)
    panel.set(xlabel="seconds since the begin; dotted: nobody trained", ylabel="workers that train", ylim=(0, None))
    panel.yaxis.get_major_locator().set_params(integer=True)
    panel.grid(alpha=0.3)


def _parts(panel, runs: Sequence[Report], events: Sequence[Sequence[Event]]) -> None:
    left = [0.0] * len(runs)
    for number, (name, title) in enumerate(PARTS.items()):
        shares = [max(0.0, _drawn(run, name)) / run.wall_s for run in runs]
        if any(shares):
            panel.barh([run.name for run in runs], shares, left=left, color=f"C{number}", label=title)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    panel.set(xlabel="share of the wall clock")
    panel.invert_yaxis()
    panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, fontsize="small")


def _drawn(run: Report, name: str) -> float:
    """Returns the seconds to draw; a negative ``slower_s`` is subtracted from the useful time."""
    faster_s = min(0.0, run.spent.slower_s) if name == "useful_s" else 0.0
    return getattr(run.spent, name) + faster_s


def _skewness(panel, runs: Sequence[Report], events: Sequence[Sequence[Event]]) -> None:
    for number, (run, told) in enumerate(zip(runs, events, strict=True)):
        points = {event["iteration"]: event["skewness"] for event in told if "skewness" in event}
        if points:
            panel.plot(points.keys(), points.values(), color=f"C{number}", label=run.name)
    panel.set(xlabel="iteration", ylabel="skewness of experts", ylim=(0, None))
    panel.grid(alpha=0.3)
    panel.legend()
