"""Random faults in small jobs, and whether the runs end as if nothing had been.

    python benchmarks/random_faults.py --faults 200 --output docs/results/random_faults_cpu.json

Each run trains a tiny model under our launcher, in one layout and with one tier of snapshots; the next run in the next,
until all have been there and enough has happened.  A run has two nodes, each with a launcher and memory of its own, but
for the layout in which both would hold the same (with a memory tier).  In each:

* one to three workers at once are killed at random points of step, snapshot, persistence and recovery, again and again
  (``--inject-mtbf-iterations``); one is stopped (SIGSTOP) somewhere in a step, and one is slow;
* the controller is killed; so is the launcher of the last node, with which its workers die;
* the last node is lost as a whole, its memory too, and comes back empty: from copies with ``peers``, else from storage;
* with ``peers``, what keeps copies on a node stands still for some seconds, so that nothing comes from its sockets;
* with ``selective``, a worker is killed once its gradients are copied and the rest is not, one between the updates of a
  recovery, and one that leads a node when this has all copies and nobody knows; with ``selective, all, folded``, what
  folds a node's gradients is killed, too.

With ``--moments recoveries`` all of it happens while a run recovers: a worker is killed every few iterations, and at
random moments before all go on the controller is killed, or paused for less or more than the silence timeout; so are
replica servers and what workers are forked from; and further workers are killed.  With ``--candidates 3`` there is a
spare, and three nodes have a candidate for the controller: any of these and any launcher may be lost, the first one
too.  A campaign can be run in pieces, of which each adds its runs to the same file:

    python benchmarks/random_faults.py --moments recoveries --faults 50 --seed 3 --append there.json

With ``--program tests/integration/lying_pretrain_gpt_moe.py`` all of it happens on a device that lies
(``tests/lying``).

At the end the run must equal that of its layout without faults: losses and gradient norms of all iterations, and the
hash of every tensor of the last snapshot.  With partial snapshots, a run that went on with experts of other iterations
than the rest must have told all iterations, counted lost tokens at each recovery, and saved the last iteration.  The
last snapshot must be whole, by what verifies checkpoints.  A run that does not end, and one that leaves
processes, memory or temporary files behind, has failed too; all files of a run that failed are kept.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, write_json
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
from moc.faults import STEP
from moc.runtime.inject import Fault

SLOW_S = 1.0


@dataclass
class Row:
    """What became of one run."""

    layout: str
    tier: str
    seed: int
    fired: list[str] = field(default_factory=list)  # each fault that happened
    generations: int = 0  # memberships that began after the first one, as far as the first worker told
    wrong: list[str] = field(default_factory=list)  # what is not as it should be; empty if all is
    seconds: float = 0.0  # from start to end
    again: list[int] = field(default_factory=list)  # iterations that stages computed again, by recovery of these alone
    by_all: list[int] = field(default_factory=list)  # the same of recoveries in which all workers computed them
    stand: list[str] = field(default_factory=list)  # if it hung, what its processes did then; a line each
    left: list[str] = field(default_factory=list)  # what it has left
    recoveries: list[float] = field(default_factory=list)  # seconds that those took which something was done to
    candidates: int = 1  # nodes that could have the controller
    stale: list[int] = field(default_factory=list)  # experts of other iterations than the rest, by recovery
    plt: float = 0.0  # most lost tokens, as a share of those so far


class Campaign:
    """Runs one after the other, until all cases have been there and enough faults have happened."""

    def __init__(self, own: argparse.Namespace, directory: Path):
        self._own, self._directory = own, directory
        self._undisturbed: dict[str, End] = {}

    def rows(self):
        """Gives what became of each run."""
        fired, cases = 0, [case for case in itertools.product(self._own.layouts, self._own.tiers) if fits(*case)]
        first = self._own.seed % len(cases) if self._own.append else 0
        for number, (layout, tier) in enumerate(itertools.cycle([*cases[first:], *cases[:first]])):
            if fired >= self._own.faults and (self._own.append or number >= len(cases)):
                return
            row = self._row(layout, tier, self._own.seed * 1000 + number, self._directory / f"run_{number:03d}")
            fired += len(row.fired)
            yield row

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

    def _without_faults(self, layout: str) -> End:
        if layout not in self._undisturbed:
            directory = self._directory / f"undisturbed_{len(self._undisturbed)}"
            run = Run(self._own, layout, "disk", directory, [])
            run.to_its_end()
            ended = run.end()
            if run.wrong or run.left or len(ended.losses) < self._own.iterations or not ended.hashes:
                raise RuntimeError(f"the run of {layout} without faults failed: see {directory}/console")
            self._undisturbed[layout] = ended
            shutil.rmtree(directory)
        return self._undisturbed[layout]


def computed_again(events: list[dict]) -> tuple[list[int], list[int]]:
    """Iterations computed again, by recovery, of stages alone and of all workers; a loss begins another recovery."""
    alone, by_all, replays = [], [], 0
    for event in events:
        if event["type"] == "generation":
            replays = 0
        elif event["type"] == "replay":
            replays += not event.get("cut_off", False)  # by a recovery that another loss has ended
        elif event["type"] == "resume" and replays:
            (alone if event["stages"] else by_all).append(replays)
            replays = 0
    return alone, by_all


def from_outside(chance: random.Random, layout: str, tier: str, iterations: int) -> tuple[Outside, ...]:
    """What is done to a run from outside; not in its last iterations, so that it comes to pass."""
    last = iterations - 5
    actions = ("controller", "agent") if tier == "selective, all" else ("controller", "agent", "node")
    done = [Outside(action, chance.randint(2, last)) for action in actions]  # all experts are in memory alone
    if "peers" in tier and nodes_of(layout, tier) > 1:
        done.append(Outside("replica_server", chance.randint(2, last), chance.choice((0, 1))))
    if "folded" in tier:
        done.append(Outside("folder", chance.randint(2, last), chance.choice((0, 1))))
    return tuple(done)


def of_selective(chance: random.Random, tier: str, size: int, nodes: int, iterations: int) -> list[Fault]:
    """Kills where selective snapshots are peculiar: at their gradients, and where nodes have copies."""
    if "selective" not in tier or "disk" in tier:
        return []
    points = [] if "states" in tier else ["gradient_staged", "folding"]
    points += ["peers_published"] if "peers" in TIERS[tier] and nodes > 1 else []
    leads = {"peers_published": range(0, size, size // nodes)}
    return [
        Fault("kill", chance.randint(2, iterations - 3), (chance.choice(leads.get(point, range(size))),), point=point)
        for point in points
    ]


def _somewhere(action: str, chance: random.Random, size: int, iterations: int) -> Fault:
    at, rank, point = chance.randint(2, iterations), chance.randrange(size), chance.choice(list(STEP))
    return Fault(action, at, (rank,), point=point, seconds=SLOW_S if action == "slow" else 0.0)


def _spread(counts: list[int]) -> dict | None:
    """Iterations that recoveries computed again."""
    return {"recoveries": len(counts), "mean": mean(counts), "most": max(counts)} if counts else None


def summary(rows: list[Row]) -> dict:
    """What all runs come to together."""
    fired = [fault for row in rows for fault in row.fired]
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
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
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
    parser.add_argument("--append", type=Path, help="JSON file, to whose runs those of this campaign are added")
    own = parser.parse_args(arguments)
    own.layouts = list(LAYOUTS) if "all" in own.layouts else own.layouts
    return own


def _write(own: argparse.Namespace, rows: list[Row]) -> None:
    """Writes what all runs have come to; with those that another piece of the campaign has added meanwhile."""
    path = own.append or own.output
    if own.append and path.exists():
        mine = {(row.layout, row.tier, row.seed) for row in rows}
        others = [Row(**run) for run in json.loads(path.read_text())["runs"]]
        rows = [row for row in others if (row.layout, row.tier, row.seed) not in mine] + rows
    flags = {name: value for name, value in vars(own).items() if name not in ("output", "append", "directory")}
    told = {"machine": machine(), "flags": flags, "summary": summary(rows), "runs": [asdict(row) for row in rows]}
    write_json(path, told)


def main() -> int:
    """Runs the campaign; 1 if a run failed."""
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
