"""Compares the simulator with real runs: ETTR of runs with random kills, measured and predicted.

    python benchmarks/simulator_vs_real.py --output docs/results/simulator_vs_real_cpu.json

Under our launcher, 4 workers (PP2 x EP2) train with one policy after the other.  One to three of them are killed
together within iterations, with a mean of 25, 50 and 100 iterations between faults.  Before, between and after these
runs, short runs without saving and faults measure the plain iteration time.

One half of each run of a policy provides the iteration time with saving, the delay until a snapshot is usable, and the
parts of a recovery.  From these and the positions of the faults, the simulator predicts the other half
(``benchmarks/ettr/predict.py``).  Each half is predicted from the other: if the machine was faster in one half, the two
errors cancel, while errors of the simulator remain.  *From the mean* is the same without the positions, over 100
runs of the model clock.  A policy is judged by its runs together.

Other flags are passed to the program.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, write_json
from benchmarks.ettr.predict import Half, Way, expected, halves, predicted
from benchmarks.live.job import MODEL, PP2_EP2, PROGRAM, Events, Job, launcher
from moc.plots import add_legend, drawings, faint
from moc.simulate.policy_costs import RecoveryCosts
from moc.simulate.profile import Profile, fitted, profile_of

WORKERS = 4
MOST = 3  # maximum number of workers killed together
EVERY = 8  # iterations between snapshots, unless each iteration has one
GOAL = 0.03
KINDS = ("measured", "predicted", "from_the_mean")
PLAIN = "no saving, no faults"
PLAIN_EVERY = 3  # policies between two plain runs
STEADY = ["--lr", "1e-9"]
"""Flags that prevent learning.

A model that learns sends more and more tokens to fewer experts, and its iterations become a third shorter.  Without
learning, both halves of a run have the same speed.
"""


@dataclass(frozen=True)
class Case:
    """A policy."""

    flags: str  # flags of the program
    way: Way  # the simulator's description


_TO_DISK = f"--ckpt-policy full --ckpt-tier disk --snapshot-interval {EVERY}"
_TO_BOTH = f"--ckpt-tier memory --snapshot-interval 1 --persist-interval {EVERY}"
CASES = {
    "full, memory": Case("--ckpt-policy full --ckpt-tier memory --snapshot-interval 1", Way()),
    "full, disk": Case(_TO_DISK, Way(EVERY)),
    "full, blocking": Case(f"{_TO_DISK} --ckpt-blocking", Way(EVERY, blocking=True)),
    "pec": Case(f"--ckpt-policy pec --pec-k 2 {_TO_BOTH}", Way(exact=False)),
    "selective": Case(f"--ckpt-policy selective --selective-experts 2 {_TO_BOTH}", Way(exact=False)),
    "sparse": Case("--ckpt-policy sparse --sparse-window 3", Way(window=3)),
    "sparse, logs": Case("--ckpt-policy sparse --sparse-window 3 --upstream-logging", Way(window=3)),
}
"""Methods of Gemini, CheckFreq and Megatron-DeepSpeed (full), then MoC-System, MoEtion and MoEvement."""


def planned(mean: float, iterations: int, seed: int) -> list[str]:
    """Returns faults in the format of ``--inject``, at random positions of the run with this mean distance.

    They occur in the computation of an iteration, as faults at random times mostly do.  Faults at the named points of
    snapshots would coincide with each snapshot.
    """
    chance, places = random.Random(seed), range(2 * EVERY, iterations - EVERY)
    told = []
    for at in sorted(chance.sample(places, round(len(places) / mean))):
        ranks = sorted(chance.sample(range(WORKERS), chance.randint(1, MOST)))
        told.append(f"kill ranks={','.join(map(str, ranks))} iteration={at} point=before_commit")
    return told


def run(flags: Sequence[object], iterations: int, events: Path | None) -> list[dict]:
    """Trains to the end and returns the events; an existing file of events is read instead."""
    if events is not None and events.exists():
        return Events(events).all()
    command = [*launcher(WORKERS), PROGRAM, *MODEL, *PP2_EP2, *STEADY, "--train-iters", iterations, *flags]
    with tempfile.TemporaryDirectory(prefix="ettr-") as files:
        with Job(command, files, saves="--ckpt-policy" in flags) as job:
            if job.process.wait() != 0:
                raise RuntimeError(f"a run with {' '.join(map(str, flags))} failed:\n{job.last_words()}")
            told = list(job.events.all())
        if events is not None:
            shutil.copy(Path(files) / "log" / "events.jsonl", events)
    return told


@dataclass(frozen=True)
class Told:
    """Observations of a policy at one mean distance of faults."""

    events: Sequence[dict]  # events of its run
    plain: Sequence[Sequence[dict]]  # events of the plain runs between policies

    @property
    def plain_s(self) -> float:
        """Seconds of a plain iteration."""
        return fmean(profile_of(events).mean_iteration_s for events in self.plain)


def judge(runs: Mapping[float, Mapping[str, Told]], ways: Mapping[str, Way]) -> dict[str, dict[float, dict]]:
    """Returns the ETTR of both halves, measured and predicted, with the inputs, by policy and mean distance of faults.

    Raises:
        ValueError: a policy's first or second halves had no recovery to learn from.
    """
    return {name: _judge_policy(name, way, {mtbf: of[name] for mtbf, of in runs.items()}) for name, way in ways.items()}


def _judge_policy(name: str, way: Way, runs: Mapping[float, Told]) -> dict[float, dict]:
    cut = {mtbf: halves(told.events, way.interval) for mtbf, told in runs.items()}
    found = {mtbf: [] for mtbf in runs}
    for known, other in ((0, 1), (1, 0)):
        profiles = {mtbf: profile_of(pair[known].events) for mtbf, pair in cut.items()}
        recoveries = [one for profile in profiles.values() for one in profile.recoveries]
        if not recoveries:
            raise ValueError(f"no worker was lost in the halves of {name} to learn from: run longer")
        parts = fitted(recoveries)
        for mtbf, pair in cut.items():
            found[mtbf].append(_judge_half(way, mtbf, pair[other], profiles[mtbf], parts, runs[mtbf].plain_s))
    return {mtbf: _whole(told, runs[mtbf].plain_s) for mtbf, told in found.items()}


def _judge_half(way: Way, mtbf: float, half: Half, profile: Profile, parts: RecoveryCosts, plain_s: float) -> dict:
    known = (profile, parts, plain_s)
    return {
        "measured": half.ettr(plain_s),
        "predicted": predicted(way, half, *known),
        "from_the_mean": expected(way, half.seconds, mtbf, *known),
        "seconds": half.seconds,
        "iterations": half.iterations,
        "faults": [asdict(hit) for hit in half.hits],
        "iteration_s": profile.mean_iteration_s,
        "usable_s": profile.usable_s,
        "recovery": asdict(parts),
        "recoveries_seen": [{"lost": one.lost} | asdict(one.parts) for one in profile.recoveries],
    }


def _whole(found: Sequence[Mapping], plain_s: float) -> dict:
    """Returns the result of a run whose halves were predicted from each other."""
    seconds = sum(half["seconds"] for half in found)
    ettr = {kind: sum(half[kind] * half["seconds"] for half in found) / seconds for kind in KINDS}
    return {**ettr, "seconds": seconds, "plain_iteration_s": plain_s, "halves": list(found)}


def together(by: Mapping[float, Mapping[str, float]], kind: str) -> float:
    """Returns the ETTR of all runs of a policy together, measured or predicted."""
    return sum(one[kind] * one["seconds"] for one in by.values()) / sum(one["seconds"] for one in by.values())


def error(by: Mapping[float, Mapping[str, float]]) -> float:
    """Returns predicted minus measured ETTR of a policy."""
    return together(by, "predicted") - together(by, "measured")


def table(found: Mapping[str, Mapping[float, Mapping[str, float]]]) -> list[str]:
    """Returns a Markdown table with a line for each policy: measured / predicted (from the mean only)."""
    means = list(next(iter(found.values())))
    lines = ["| | " + " | ".join(f"every {mean:g} iterations" for mean in means) + " | together | error, points |"]
    lines.append("|---|" + "---|" * (len(means) + 2))
    for name, by in found.items():
        cells = [f"{by[m]['measured']:.3f} / {by[m]['predicted']:.3f} ({by[m]['from_the_mean']:.3f})" for m in means]
        cells.append(f"{together(by, 'measured'):.3f} / {together(by, 'predicted'):.3f}")
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {100 * error(by):+.1f} |")
    return lines


def draw(found: Mapping[str, Mapping[float, Mapping[str, float]]], output: Path) -> None:
    """Draws predicted over measured ETTR, and the allowed band."""
    values = [one[kind] for by in found.values() for one in by.values() for kind in ("measured", "predicted")]
    ends = [min(values) - 0.05, max(values) + 0.05]
    for _, [[panel]] in drawings(output, figsize=(6, 7)):
        panel.fill_between(ends, [e - GOAL for e in ends], [e + GOAL for e in ends], color=faint(), label="3 points")
        for number, (name, by) in enumerate(found.items()):
            for (mean, one), marker in zip(by.items(), "ovsD^", strict=False):
                how = dict(color=f"C{number}", label=f"{name}, {mean:g}", linestyle="")
                panel.plot(one["measured"], one["predicted"], marker, **how)
        panel.set(xlabel="ETTR, measured", ylabel="ETTR, predicted", xlim=ends, ylim=ends)
        panel.set_title("ETTR of the simulator and of real runs")
        add_legend(panel, title="policy, iterations from fault to fault", columns=2)


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Parses the command line; returns the benchmark's flags, and the program's."""
    parser = command_line(__doc__, "JSON file; the plot is written to the same directory")
    parser.add_argument("--mtbf", type=float, nargs="+", default=[25, 50, 100], metavar="N", help="from fault to fault")
    parser.add_argument("--iterations", type=int, nargs="+", default=[240, 200, 200], metavar="N", help="of such runs")
    parser.add_argument("--plain", type=int, default=50, help="of each run without saving and faults (default: 50)")
    parser.add_argument("--policies", nargs="+", choices=CASES, default=list(CASES), metavar="POLICY")
    parser.add_argument("--seed", type=int, default=0, help="of the faults, the same for all policies (default: 0)")
    parser.add_argument("--events", type=Path, help="directory to keep events in; runs that are there are not repeated")
    own, flags = parser.parse_known_args(arguments)
    if len(own.iterations) != len(own.mtbf):
        parser.error("--iterations needs as many numbers as --mtbf")
    return own, flags


def _run(own: argparse.Namespace, name: str, mtbf: float, iterations: int, flags: Sequence[object]) -> list[dict]:
    kept = own.events and own.events / f"{name.replace(', ', '-').replace(' ', '-')}_{mtbf:g}.jsonl"
    events = run(flags, iterations, kept)
    seconds = [event["elapsed_s"] for event in events if event["type"] == "iteration"]
    print(f"every {mtbf:g}: {name}: {len(seconds)} iterations of {median(seconds):.3f} s", flush=True)
    return events


def main() -> int:
    """Runs, predicts and prints the table; returns whether a policy's prediction is more than 3 points off."""
    own, flags = parse()
    if own.events is not None:
        own.events.mkdir(parents=True, exist_ok=True)
    here, runs = machine(load=True), {}
    for mtbf, iterations in zip(own.mtbf, own.iterations, strict=True):
        faults = ["--inject", *planned(mtbf, iterations, own.seed)]
        plain, events = [], {}
        for number, name in enumerate(own.policies):
            if number % PLAIN_EVERY == 0:
                plain.append(_run(own, f"{PLAIN} {number}", mtbf, own.plain, flags))
            events[name] = _run(own, name, mtbf, iterations, [*flags, *CASES[name].flags.split(), *faults])
        plain.append(_run(own, f"{PLAIN} {len(own.policies)}", mtbf, own.plain, flags))
        runs[mtbf] = {name: Told(told, plain) for name, told in events.items()}
    found = judge(runs, {name: CASES[name].way for name in own.policies})
    print(*table(found), sep="\n")
    worst = max(abs(error(by)) for by in found.values())
    print(f"worst error {100 * worst:.1f} points: {'holds' if worst <= GOAL else 'DOES NOT HOLD'}: {100 * GOAL:g}")
    single = max(abs(one["predicted"] - one["measured"]) for by in found.values() for one in by.values())
    print(f"worst error of a single run: {100 * single:.1f} points")
    if own.output is not None:
        told = {"machine": here, "flags": [*MODEL, *PP2_EP2, *STEADY, *flags]}
        told |= {"iterations": own.iterations, "seed": own.seed}
        told |= {"policies": {name: CASES[name].flags for name in own.policies}}
        told |= {"errors": {name: error(by) for name, by in found.items()}, "ettr": found}
        write_json(own.output, told)
        draw(found, own.output.with_suffix(".png"))
    return worst > GOAL


if __name__ == "__main__":
    sys.exit(main())
