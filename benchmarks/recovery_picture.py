"""Draws a recovery: the activity of each worker before, during and after the kill of one worker.

    python benchmarks/recovery_picture.py --output docs/recovery.png

Trains with 4 workers (PP2 x EP2) and a snapshot in memory after every iteration, and kills worker 2 in the middle of an
iteration.  Then it trains without a kill, and compares all losses and gradient norms.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.live.job import IN_MEMORY, MODEL, PP2_EP2, PROGRAM, Job, launcher
from moc.cli_output import Parser
from moc.plots import add_legend, drawings, faint, ink, paper

WORKERS, VICTIM = 4, 2
KILL_AT, ITERATIONS = 20, 26
SHOWN = 3  # iterations before and after the kill


def train(kill: bool) -> tuple[list[dict], list[tuple[float, str]], float]:
    """Returns events and output lines of a job, and the time of the kill."""
    command = [*launcher(WORKERS), PROGRAM, *MODEL, *PP2_EP2, *IN_MEMORY, "--train-iters", ITERATIONS]
    killed = 0.0
    with tempfile.TemporaryDirectory(prefix="picture-") as files, Job(command, files, saves=True) as job:
        if kill:
            job.reach(KILL_AT)
            time.sleep(job.events.of("iteration")[-1]["elapsed_s"] / 2)
            os.kill(job.workers()[VICTIM], signal.SIGKILL)
            killed = time.time()
        job.process.wait(300)
        return list(job.events.all()), job.said, killed


def history(events: list[dict]) -> dict[int, tuple[float, float]]:
    """Returns the loss and the gradient norm of each iteration."""
    return {one["iteration"]: (one["loss"], one["grad_norm"]) for one in events if one["type"] == "iteration"}


def draw(path: Path, events: list[dict], said: list[tuple[float, str]], killed: float, same: bool) -> None:
    """Draws the workers' activities over the seconds since the kill."""
    done = [(one["time"], one["iteration"], one["elapsed_s"]) for one in events if one["type"] == "iteration"]
    before = [one for one in done if one[0] < killed][-SHOWN:]
    after = [one for one in done if one[0] > killed][:SHOWN]
    (generation,) = (one for one in events if one["type"] == "generation")
    forked = next(at for at, line in said if at > killed and re.match(f"mocrun: worker {VICTIM} is process", line))
    left = generation["time"] - generation["met_s"]
    for _, [[panel]] in drawings(path, dpi=110, figsize=(9, 3.6)):
        bars: dict[str, Any] = dict(height=0.7, edgecolor=paper())
        for worker in range(WORKERS):
            for at, number, elapsed in (*before, *after):
                panel.barh(worker, elapsed, left=at - elapsed - killed, color="C0", **bars)
                panel.text(at - elapsed / 2 - killed, worker, number, color=paper(), ha="center", va="center")
            begun, ended = before[-1][0], killed if worker == VICTIM else left
            panel.barh(worker, ended - begun, left=begun - killed, color="C0", alpha=0.45, **bars)
            if worker == VICTIM:
                panel.barh(worker, generation["time"] - forked, left=forked - killed, color="C2", **bars)
            else:
                panel.barh(worker, generation["time"] - left, left=left - killed, color=faint(), **bars)
            loads = after[0][0] - after[0][2] - generation["time"]
            panel.barh(worker, loads, left=generation["time"] - killed, color="C3", **bars)
        panel.plot(0, VICTIM, "X", color="C1", markersize=14, label="kill -9")
        panel.axvline(generation["time"] - killed, color=ink(), linestyle=":", linewidth=1)
        panel.barh(0, 0, color="C0", label="iteration")
        panel.barh(0, 0, color="C0", alpha=0.45, label="interrupted")
        panel.barh(0, 0, color=faint(), label="waits, and keeps its state")
        panel.barh(0, 0, color="C2", label=f"new worker 2, forked after {1000 * (forked - killed):.0f} ms")
        panel.barh(0, 0, color="C3", label=f"connected after {generation['time'] - killed:.2f} s; worker 2 loads")
        panel.set(yticks=range(WORKERS), yticklabels=[f"worker {worker}" for worker in range(WORKERS)])
        panel.set(xlabel="seconds since the kill")
        trains = after[0][0] - after[0][2] - killed
        title = f"Training continues {trains:.2f} s after the kill"
        if same:
            title += f";\nall {ITERATIONS} losses and gradient norms equal the values of a run without it"
        panel.set_title(title)
        panel.grid(False, axis="y")
        arrow = dict(arrowstyle="<->", color=ink(), shrinkA=0, shrinkB=0)
        panel.annotate("", (0, WORKERS - 0.45), (trains, WORKERS - 0.45), arrowprops=arrow)
        box = dict(facecolor=paper(), edgecolor="none", pad=1)
        panel.text(trains / 2, WORKERS - 0.38, f"no useful work for {trains:.2f} s", ha="center", va="top", bbox=box)
        panel.set_ylim(WORKERS, -0.5)
        add_legend(panel)


def main() -> int:
    """Trains and draws; returns 1 if the killed run differs from the other."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="PNG")
    output = parser.parse_args().output
    events, said, killed = train(kill=True)
    whole, *_ = train(kill=False)
    same = history(events) == history(whole) and len(history(whole)) == ITERATIONS
    draw(output, events, said, killed, same)
    print(f"{'equal' if same else 'NOT equal'}: losses and gradient norms of {len(history(whole))} iterations")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
