"""Injects random faults into small jobs, and checks that the results equal runs without faults.

    python benchmarks/random_faults.py --faults 200 --output docs/results/random_faults_cpu.json

Each run trains a tiny model under our launcher, with one layout and one snapshot tier.  Runs cycle through all
combinations until each has run and enough faults have occurred.  A run has two nodes, each with its own launcher and
memory.  With the layout ``DP4, replicated`` and a memory tier it has one, as both would store the same.  In each run

* one to three workers are killed together at random points of step, snapshot, persistence and recovery, repeatedly
  (``--inject-mtbf-iterations``); one worker is stopped (SIGSTOP) within a step, and one is slowed down;
* the controller is killed, and the launcher of the last node, which ends its workers;
* the last node is lost with its memory and returns empty: it restores from copies with ``peers``, otherwise from
  storage;
* with ``peers``, a replica server is stopped for some seconds, with its sockets open;
* with ``selective``, a worker is killed when only its gradients are copied, and one between the updates of a recovery.
  A node's lead worker is killed when the node has all copies but has not reported it.  With ``selective, all, folded``
  the process that applies a node's gradients is killed, too.

With ``--moments recoveries`` all faults occur during recoveries.  A worker is killed every few iterations.  Before all
continue, at random moments, the controller is killed, or paused for less or more than the silence timeout.  Replica
servers and forkservers are killed or paused briefly, and further workers are killed.  With ``--candidates 3`` there is
a spare, and three nodes have a candidate for the controller: any of these and any launcher may be lost, including the
first.  A campaign can be run in pieces, which all add their runs to the same file:

    python benchmarks/random_faults.py --moments recoveries --faults 50 --seed 3 --append there.json

With ``--program tests/integration/lying_pretrain_gpt_moe.py`` all faults occur on a simulated unreliable device
(``tests/lying``).

With ``--drawn N`` the flags of N runs are drawn by ``--seed``: losses, router, precision, schedule, optimizer, layout
(two workers, also DP 1 and DeepSpeed) and policy; see ``benchmarks/faults/drawn.py``.  Each value occurs in at least
three runs if N is 20 or more.  In each run, a worker is also killed inside a micro batch, and before an evaluation.

    python benchmarks/random_faults.py --drawn 24 --iterations 14 --output there.json

At the end the run must equal the run of its layout without faults in losses, gradient norms, evaluations and the hash
of every tensor of the last snapshot.  A run with partial snapshots that continued with stale experts must instead have
reported all iterations, counted lost tokens at each recovery, and saved the last iteration.  The last snapshot must be
valid.  A run also fails if it does not end, or if processes, memory or temporary files remain.  All files of a failed
run are kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, write_json
from benchmarks.faults.drawn import SMALL_LAYOUTS, DrawnRun, draw_runs
from benchmarks.faults.recovery import Recoveries, troubles
from benchmarks.faults.run import (  # noqa: E402
    LAYOUTS,
    TIERS,
    End,
    Outside,
    Run,
    damages,
    fits,
    judge,
    nodes_of,
)
from moc.errors import codes_in
from moc.fault_points import STEP
from moc.runtime.fault_injection import Fault

SLOW_S = 1.0


@dataclass
class Row:
    """Outcome of one run."""

    layout: str
    tier: str
    seed: int
    fired: list[str] = field(default_factory=list)  # faults that occurred
    generations: int = 0  # memberships after the first one, as reported by the first worker
    wrong: list[str] = field(default_factory=list)  # failed checks; empty if the run passed
    seconds: float = 0.0  # from start to end
    again: list[int] = field(default_factory=list)  # iterations repeated by stages, for each recovery of stages
    by_all: list[int] = field(default_factory=list)  # iterations repeated by all workers, for each recovery of all
    stand: list[str] = field(default_factory=list)  # states of the processes, if the run hung; a line each
    left: list[str] = field(default_factory=list)  # leftovers of the run
    recoveries: list[float] = field(default_factory=list)  # seconds of recoveries that were disturbed
    candidates: int = 1  # nodes that may run the controller
    stale: list[int] = field(default_factory=list)  # stale experts, by recovery
    plt: float = 0.0  # largest share of lost tokens
    values: dict[str, str] = field(default_factory=dict)  # drawn values by factor


class WithoutFaultsError(Exception):
    """Failure of a run without faults; the message has its exit codes and the codes of its errors."""


class Campaign:
    """Runs in sequence, until all cases have run and enough faults have occurred."""

    def __init__(self, own: argparse.Namespace, directory: Path):
        self._own, self._directory = own, directory
        self._undisturbed: dict[tuple[str, ...], End] = {}
        self._numbers = itertools.count()

    def rows(self):
        """Yields the outcome of each run."""
        if self._own.drawn:
            for number, run in enumerate(draw_runs(self._own.seed, self._own.drawn)):
                if number not in (self._own.only or [number]):
                    continue
                seed, directory = self._own.seed * 1000 + number, self._directory / f"run_{number:03d}"
                try:
                    yield self._drawn_row(run, seed, directory)
                except WithoutFaultsError as error:
                    layout, tier = run.values["layout"], run.values["tier"]
                    yield Row(layout, tier, seed, wrong=[str(error)], values=dict(run.values))
            return
        fired, cases = 0, [case for case in itertools.product(self._own.layouts, self._own.tiers) if fits(*case)]
        first = self._own.seed % len(cases) if self._own.append else 0
        for number, (layout, tier) in enumerate(itertools.cycle([*cases[first:], *cases[:first]])):
            if fired >= self._own.faults and (self._own.append or number >= len(cases)):
                return
            row = self._row(layout, tier, self._own.seed * 1000 + number, self._directory / f"run_{number:03d}")
            fired += len(row.fired)
            yield row

    def _drawn_row(self, drawn: DrawnRun, seed: int, directory: Path) -> Row:
        """Runs drawn flags with random faults, and kills inside a micro batch and before an evaluation."""
        layout, tier, iterations = drawn.values["layout"], drawn.values["tier"], self._own.iterations
        expected, chance = self._without_faults(layout, drawn.flags), random.Random(seed)
        size = SMALL_LAYOUTS[layout][0]
        kills = [
            Fault("kill", at, (chance.randrange(size),), point=point)
            for at, point in ((chance.randint(2, iterations - 2), "forward_backward"), (6, "completed"))
        ]
        faults = ["--inject-mtbf-iterations", self._own.mtbf, "--inject-seed", seed, "--inject", *kills]
        run = Run(self._own, layout, tier, directory, faults, flags=drawn.flags)
        outside = from_outside(chance, layout, tier, iterations)
        loses_all = tier == "gradient" or nodes_of(layout, tier) == 1  # of memory, before a cycle is in storage
        survivable = [one for one in outside if one.action != "node" or not loses_all]
        seconds = run.to_its_end((chance.choice(survivable),))
        ended = run.end()
        fired = ["{action} {rank} at {iteration}, {point}".format(**event) for event in run.events.of("inject")]
        fired += map(str, run.done)
        wrong = run.wrong + judge(tier, ended, expected, run.events) + damages(directory / "snapshots")
        if not wrong and not run.left:
            shutil.rmtree(directory)
        again, generations = computed_again(run.events.all()), len(run.events.of("generation"))
        became = (run.stand, run.left)
        return Row(
            layout, tier, seed, fired, generations, wrong, round(seconds, 1), *again, *became, values=dict(drawn.values)
        )

    def _row(self, layout: str, tier: str, seed: int, directory: Path) -> Row:
        expected = self._without_faults(layout)
        chance, size, iterations = random.Random(seed), LAYOUTS[layout][0], self._own.iterations
        recoveries, candidates = Recoveries(()), 1
        if self._own.moments == "recoveries":
            nodes = nodes_of(layout, tier)
            candidates = self._own.candidates if nodes > 1 else 1
            recoveries = Recoveries(troubles(chance, size, nodes, iterations, candidates=candidates))
            run = Run(self._own, layout, tier, directory, [], candidates)
            seconds = run.to_its_end(recoveries=recoveries)
        else:
            faults = ["--inject-mtbf-iterations", self._own.mtbf, "--inject-seed", seed]
            inside = [_somewhere(kind, chance, size, iterations) for kind in ("stop", "slow")]
            inside += of_selective(chance, tier, size, nodes_of(layout, tier), iterations)
            run = Run(self._own, layout, tier, directory, [*faults, "--inject", *inside])
            seconds = run.to_its_end(from_outside(chance, layout, tier, iterations))
        ended = run.end()
        fired = ["{action} {rank} at {iteration}, {point}".format(**event) for event in run.events.of("inject")]
        fired += [*map(str, run.done), *recoveries.done]
        wrong = run.wrong + judge(tier, ended, expected, run.events) + damages(directory / "snapshots")
        lost = [event["plt"] for event in run.events.of("lost")]
        stale = [event["stale"] for event in run.events.of("resume")]
        if not wrong and not run.left:
            shutil.rmtree(directory)
        again, generations = computed_again(run.events.all()), len(run.events.of("generation"))
        became = (run.stand, run.left, recoveries.seconds, candidates, stale, max(lost, default=0.0))
        return Row(layout, tier, seed, fired, generations, wrong, round(seconds, 1), *again, *became)

    def _without_faults(self, layout: str, flags: Sequence[str] = ()) -> End:
        key = (layout, *flags)
        if key not in self._undisturbed:
            directory = self._directory / f"undisturbed_{next(self._numbers)}"
            run = Run(self._own, layout, "disk", directory, [], flags=flags)
            run.to_its_end()
            ended = run.end()
            if run.wrong or run.left or len(ended.losses) < self._own.iterations or not ended.hashes:
                found = [*run.wrong, *run.left, *codes_in((directory / "console").read_text())]
                raise WithoutFaultsError(f"without faults: {', '.join(found) or 'iterations are missing'}; {directory}")
            self._undisturbed[key] = ended
            shutil.rmtree(directory)
        return self._undisturbed[key]


def computed_again(events: list[dict]) -> tuple[list[int], list[int]]:
    """Returns the iterations repeated by each recovery of stages, and by each recovery of all workers.

    A further loss starts a new recovery.
    """
    alone, by_all, replays = [], [], 0
    for event in events:
        if event["type"] == "generation":
            replays = 0
        elif event["type"] == "replay":
            replays += not event.get("cut_off", False)  # by a recovery that another loss ended
        elif event["type"] == "resume" and replays:
            (alone if event["stages"] else by_all).append(replays)
            replays = 0
    return alone, by_all


def from_outside(chance: random.Random, layout: str, tier: str, iterations: int) -> tuple[Outside, ...]:
    """Returns faults injected from outside; none in the last iterations, so that each occurs."""
    last = iterations - 5
    actions = ("controller", "agent") if tier == "selective, all" else ("controller", "agent", "node")
    done = [Outside(action, chance.randint(2, last)) for action in actions]  # "selective, all": experts in memory only
    if "peers" in tier and nodes_of(layout, tier) > 1:
        done.append(Outside("replica_server", chance.randint(2, last), chance.choice((0, 1))))
    if "folded" in tier:
        done.append(Outside("folder", chance.randint(2, last), chance.choice((0, 1))))
    return tuple(done)


def of_selective(chance: random.Random, tier: str, size: int, nodes: int, iterations: int) -> list[Fault]:
    """Returns kills at the special points of selective snapshots: at their gradients, and when nodes have copies."""
    if "selective" not in tier or "disk" in tier:
        return []
    points = [] if "states" in tier else ["gradient_staged", "folding"]
    points += ["peers_committed"] if "peers" in TIERS[tier] and nodes > 1 else []
    leads = {"peers_committed": range(0, size, size // nodes)}
    return [
        Fault("kill", chance.randint(2, iterations - 3), (chance.choice(leads.get(point, range(size))),), point=point)
        for point in points
    ]


def _somewhere(action: str, chance: random.Random, size: int, iterations: int) -> Fault:
    at, rank, point = chance.randint(2, iterations), chance.randrange(size), chance.choice(list(STEP))
    return Fault(action, at, (rank,), point=point, seconds=SLOW_S if action == "slow" else 0.0)


def _spread(counts: list[int]) -> dict | None:
    """Returns statistics of the iterations that recoveries repeated."""
    return {"recoveries": len(counts), "mean": mean(counts), "most": max(counts)} if counts else None


def summary(rows: list[Row]) -> dict:
    """Summarizes all runs."""
    fired = [fault for row in rows for fault in row.fired]
    inside = Counter(item for row in rows if any(map(_is_inside, row.fired)) for item in row.values.items())
    return {
        "runs": len(rows),
        "equal": sum(not row.wrong and not row.left for row in rows),
        "wrong": sum(bool(row.wrong) and not row.stand for row in rows),
        "hangs": sum(bool(row.stand) for row in rows),
        "leftovers": sum(bool(row.left) for row in rows),
        "faults": len(fired),
        "by_point": dict(Counter(fault.rpartition(" ")[2] for fault in fired).most_common()),
        "computed_again": _spread([count for row in rows for count in row.again]),
        "computed_again_by_all": _spread([count for row in rows for count in row.by_all]),
        "by_action": dict(Counter(fault.partition(" ")[0] for fault in fired)),
        "killed_inside_micro_batches_by_value": {
            f"{factor}: {value}": inside[factor, value] for factor, value in inside
        },
    }


def _is_inside(fault: str) -> bool:
    return fault.startswith("kill") and fault.endswith("forward_backward")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--faults", type=int, default=200, help="at least so many")
    parser.add_argument("--layouts", nargs="+", choices=["all", *LAYOUTS], default=["all"], metavar="LAYOUT")
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=list(TIERS), metavar="TIER")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=24, help="of each run")
    parser.add_argument("--mtbf", type=float, default=6.0, help="iterations from one random fault to the next")
    parser.add_argument("--silence", type=float, default=10.0, help="seconds after which a stopped worker is lost")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which a run hangs")
    parser.add_argument("--directory", type=Path, help="for the files of runs; by default a temporary one")
    moments = {"choices": ["iterations", "recoveries"], "default": "iterations"}
    parser.add_argument("--moments", **moments, help="when faults happen (default: %(default)s)")
    several = "for the controller, of runs on several nodes, in recoveries"
    parser.add_argument("--candidates", type=int, choices=[1, 3], default=1, help=several)
    parser.add_argument("--program", default="pretrain_gpt_moe.py", help="of the workers (default: %(default)s)")
    drawn = "draw flags of models and optimizers for so many runs with two workers, instead of --layouts and --tiers"
    parser.add_argument("--drawn", type=int, default=0, help=drawn)
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="of the runs of --drawn, from 0 on")
    parser.add_argument("--append", type=Path, help="JSON file that the runs of this campaign are added to")
    own = parser.parse_args(arguments)
    own.layouts = list(LAYOUTS) if "all" in own.layouts else own.layouts
    return own


def _write(own: argparse.Namespace, rows: list[Row]) -> None:
    """Writes the outcomes of all runs, including those added by other pieces of the campaign."""
    path = own.append or own.output
    if own.append and path.exists():
        mine = {(row.layout, row.tier, row.seed) for row in rows}
        others = [Row(**run) for run in json.loads(path.read_text())["runs"]]
        rows = [row for row in others if (row.layout, row.tier, row.seed) not in mine] + rows
    flags = {name: value for name, value in vars(own).items() if name not in ("output", "append", "directory")}
    told = {"machine": machine(), "flags": flags, "summary": summary(rows), "runs": [asdict(row) for row in rows]}
    write_json(path, told)


def main() -> int:
    """Runs the campaign; returns 1 if a run failed."""
    own, rows = parse(), []
    directory = own.directory or Path(tempfile.mkdtemp(prefix="random-faults-"))
    for row in Campaign(own, directory).rows():
        rows.append(row)
        wrong = row.wrong + row.left
        what = "EQUAL" if not wrong else f"FAILED: {'; '.join(wrong)} (see {directory}/run_{len(rows) - 1:03d})"
        print(f"{row.layout:17} {row.tier:13} {len(row.fired):3} faults {row.seconds:6.1f} s  {what}", flush=True)
        if own.append or own.output:
            _write(own, rows)
    print(json.dumps(summary(rows), indent=1))
    if all(not row.wrong and not row.left for row in rows):
        shutil.rmtree(directory)
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
