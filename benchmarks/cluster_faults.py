"""Injects failures of hosts, links and storage into a job on several machines, and checks its result.

    python benchmarks/cluster_faults.py --list
    python benchmarks/cluster_faults.py --only "first lost" --keep /tmp/there     # one row; keeps consoles and events
    python benchmarks/cluster_faults.py --output docs/results/cluster_faults_cpu.json
    python benchmarks/cluster_faults.py --layout elastic --tiers disk --iterations 200 --patience 90

The machines are namespaces of this machine (benchmarks/cluster/hosts.py). Each has its own network, memory and
processes. A power loss ends all processes of a host without a message; a cut link drops packets silently. All hosts
share one storage, a file system that can be frozen. The program needs root; without root it exits with 0.

A row fails if

* the job does not end, or a host exits with an unexpected code;
* losses, gradient norms or the hash of any region of the last snapshot differ from the run without faults. Partial
  snapshots are exempt if the run continued with stale experts and counted the lost tokens;
* a host that was cut off prints no reason, or a console has a traceback;
* processes, temporary files or memory remain after a job that exited with 0;
* two generations were active simultaneously: an iteration was reported twice, or a rank ran on two hosts while an
  iteration was reported or a checkpoint committed;
* a manifest of an older generation followed one of a newer generation.

With ``--layout elastic``, five hosts train, and at least three continue in process when others fail.  Losses must then
be within 1e-5 of the run without faults, no iteration may be computed twice, and no checkpoint may be read.  Ranks are
not checked there, because they change with each membership.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cluster import elastic
from benchmarks.cluster.hosts import Cluster, Storage, unusable
from benchmarks.cluster.job import PORT, ClusterJob
from benchmarks.cluster.judge import overlaps, two_worlds
from benchmarks.cluster.scenarios import CONTROLLER, Scenario, Step, scenarios
from benchmarks.common import command_line, write_json
from benchmarks.faults.run import EP2, LAYOUTS, MODEL, TIERS, ZERO, End, end_of, judge, standing

AGAIN = 75
_ALONE = "MOC_CLUSTER_FAULTS_ALONE"
HERE = {"EP2": (2, f"{ZERO} {EP2}"), **LAYOUTS, "elastic": (elastic.HOSTS, elastic.FLAGS)}


@dataclass
class Row:
    """Outcome of one scenario."""

    scenario: str
    tier: str
    wrong: list[str] = field(default_factory=list)  # failed checks; empty if the row passed
    codes: dict[int, int | None] = field(default_factory=dict)  # exit codes by host
    generations: int = 0  # memberships after the first one
    lived_twice_s: float = 0.0  # total time that a rank ran on two hosts
    stood_still_s: float = 0.0  # the longest time between two iterations
    seconds: float = 0.0
    stand: dict[str, list[str]] = field(default_factory=dict)  # states of the processes, if the job did not end
    stale: list[int] = field(default_factory=list)  # stale experts, by recovery
    plt: float = 0.0  # largest share of lost tokens
    members: list[int] = field(default_factory=list)  # workers of each membership that trained


class Trial:
    """One job in one scenario, on a cluster of running hosts; ``wrong`` lists unexpected behavior."""

    def __init__(self, own: argparse.Namespace, directory: Path, cluster: Cluster, storage: Storage, tier: str):
        workers, parallel = HERE[own.layout]
        hosts = own.nnodes + own.spares
        candidates = ",".join(f"h{i}:{PORT}" for i in range(min(own.candidates, hosts)))
        nnodes = f"{own.least}:{own.nnodes}" if own.layout == "elastic" else own.nnodes
        launcher = ["--nnodes", nnodes, "--nproc-per-node", workers // own.nnodes, "--spares", own.spares]
        launcher += ["--rdzv-endpoint", candidates, "--silence-timeout", own.silence]
        launcher += ["--max-standstill", 1000]  # faults may strike at one iteration again and again
        launcher += ["--max-wait", own.max_wait, "--patience", own.patience, "--grow-wait", own.grow_wait]
        program = [*MODEL, "--train-iters", own.iterations, *parallel.split(), *TIERS[tier].split()]
        self._own, self._cluster, self._storage, self._directory = own, cluster, storage, directory
        self._snapshots = storage.path / "snapshots"
        self.job = ClusterJob(cluster, launcher, program, directory, self._snapshots)
        self._deadline = time.monotonic() + own.limit
        self.wrong: list[str] = []
        self._said: dict[int, int] = {}  # by isolated host: length of its console before
        self._scenario = Scenario("", ())

    def run(self, scenario: Scenario) -> None:
        """Runs until all launchers have ended or the time limit is reached."""
        self._scenario = scenario
        for host in self._cluster.hosts:
            self.job.start(host.number)
        for step in scenario.steps:
            if not self._wait_for(step):
                break
            getattr(self, f"_{step.action.replace(' ', '_')}")(self._hosts(step))
        while not self._over() and time.monotonic() < self._deadline:
            time.sleep(0.1)
            if self._ended_for_now() and not self._over():
                self._start_again()

    def end(self) -> End:
        """Returns losses and hashes of the run."""
        return end_of(self._snapshots, self._own.iterations, self.job.events)

    def codes(self) -> list[str]:
        """Returns unexpected exit codes, and isolated hosts that printed no reason."""
        wrong, aside = [], self._scenario.aside
        for number, code in self.job.codes().items():
            if code not in (None, 0) and not (code == AGAIN and number in aside):
                wrong.append(f"host {number} ended with {code}")
        for number, before in self._said.items():
            if number in aside and "mocrun: " not in self.job.said(number)[before:]:
                wrong.append(f"host {number} did not report how it ended")
        return wrong

    def _start_again(self) -> None:
        """Restarts the job, as a scheduler does after exit code 75."""
        if not self._scenario.ends:
            self.wrong.append("the job ended with 75, though a majority was left")
        for number in self.job.codes():
            self.job.start(number)

    def _over(self) -> bool:
        codes = self.job.codes().values()
        return None not in codes and (self.job.iteration() >= self._own.iterations or AGAIN not in codes)

    def _ended_for_now(self) -> bool:
        return None not in self.job.codes().values()

    def _wait_for(self, step: Step) -> bool:
        aim, limit = self.job.iteration() + step.more, time.monotonic() + self._own.still
        while self.job.iteration() < aim and not self._ended_for_now():
            if time.monotonic() > limit:
                self.wrong.append(f"{self._own.still:g} s, and iteration {aim} is not there before '{step.action}'")
                return step.action in ("thaw", "mend")
            time.sleep(0.02)
        time.sleep(step.seconds)
        return True

    def _hosts(self, step: Step) -> tuple[int, ...]:
        if CONTROLLER not in step.hosts:
            return step.hosts
        return tuple({host.number for host, _ in self.job.controllers()})[:1]

    def _cut(self, hosts: tuple[int, ...]) -> None:
        self._listen_to(hosts)
        self._cluster.cut(hosts)

    def _mend(self, _) -> None:
        self._cluster.mend()

    def _freeze(self, _) -> None:
        self._storage.freeze()

    def _thaw(self, _) -> None:
        self._storage.thaw()

    def _off(self, hosts: tuple[int, ...]) -> None:
        for number in hosts:
            self._cluster.hosts[number].power_off()

    def _on(self, hosts: tuple[int, ...]) -> None:
        for number in hosts:
            shutil.rmtree(self._directory / f"tmp{number}")  # on the host's own disk, which is lost
            self._cluster.hosts[number].power_on()
            self.job.start(number)

    def _listen_to(self, hosts: tuple[int, ...]) -> None:
        for number in hosts:
            self._said.setdefault(number, len(self.job.said(number)))

    def _stop(self, hosts: tuple[int, ...]) -> None:
        self._listen_to(hosts)
        for number in hosts:
            self.job.signal_launcher(number, signal.SIGSTOP)

    def _cont(self, hosts: tuple[int, ...]) -> None:
        for number in hosts:
            self.job.signal_launcher(number, signal.SIGCONT)

    def _kill_worker(self, hosts: tuple[int, ...]) -> None:
        for number in hosts:
            self.job.newest_worker_of(number).kill()

    def _kill_controller(self, _) -> None:
        for _, process in self.job.controllers():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _stop_controller(self, _) -> None:
        self._stopped = self.job.controllers()
        for _, process in self._stopped:
            process.suspend()

    def _cont_controller(self, _) -> None:
        for _, process in self._stopped:
            with contextlib.suppress(psutil.NoSuchProcess):  # ended by its launcher
                process.resume()


def trial(
    own: argparse.Namespace, scenario: Scenario, name: str, tier: str, directory: Path, expected: End | None = None
) -> tuple[Row, End]:
    """Runs and judges one scenario; without ``expected``, losses and hashes are not compared."""
    directory.mkdir(parents=True)
    begun, row = time.monotonic(), Row(name, tier)
    with Storage(directory) as storage, Cluster(own.nnodes + own.spares) as cluster:
        tried = Trial(own, directory, cluster, storage, tier)
        with tried.job.watch as watch:
            tried.run(scenario)
        row.wrong, row.codes = tried.wrong, tried.job.codes()
        if None in row.codes.values():
            row.wrong.append(f"no end after {own.limit:g} s")
            row.stand = {host.name: standing(host.processes()) for host in cluster.hosts}
        row.wrong += tried.codes()
        row.wrong += [f"{host.name} prints a traceback" for host in cluster.hosts if tried.job.traceback(host.number)]
        lives = [] if own.layout == "elastic" else watch.lives
        row.wrong += two_worlds(tried.job.events.all(), lives, watch.publications)
        row.wrong += [] if row.stand else _leftovers(cluster, row.codes, directory)
        ended = _plain(tried.end())
    events, row.members = tried.job.events, elastic.members(tried.job.events.all())
    if expected is not None and own.layout == "elastic":
        row.wrong += elastic.as_of_fixed_members(ended, expected, events.all())
    elif expected is not None:
        row.wrong += judge(tier, ended, expected, events)
    row.stale = [event["stale"] for event in events.of("resume")]
    row.plt = max((event["plt"] for event in events.of("lost")), default=0.0)
    row.generations = len(events.of("generation"))
    row.lived_twice_s = round(sum(end - begin for _, begin, end in overlaps(lives)), 2)
    moments = [event["time"] for event in events.of("iteration")]
    row.stood_still_s = round(max((b - a for a, b in zip(moments, moments[1:], strict=False)), default=0.0), 2)
    row.seconds = round(time.monotonic() - begun, 1)
    return row, ended


def _leftovers(cluster: Cluster, codes: dict[int, int | None], directory: Path) -> list[str]:
    """Returns what remains after a job that ended well."""
    time.sleep(0.5)  # the kernel needs a moment to end orphaned processes
    wrong = [f"{process} is left on {host.name}" for host in cluster.hosts for process in host.processes()]
    for host in cluster.hosts:
        if codes.get(host.number) == 0:
            files = [path for path in host.memory.rglob("*") if path.is_file() and path.stat().st_size]
            wrong += [f"{len(files)} files are left in {host.name}'s memory"] if files else []
            wrong += [f"{path} is left" for path in directory.glob(f"tmp{host.number}/mocrun-*")]
    return wrong


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--list", action="store_true", help="print the rows, and stop")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these rows")
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=["peers"], metavar="TIER")
    parser.add_argument("--layout", choices=HERE, default="EP2")
    parser.add_argument("--nnodes", type=int, help="hosts that train; by default 2, and 5 of an elastic job")
    parser.add_argument("--least", type=int, default=elastic.LEAST, help="minimum number of hosts of an elastic job")
    parser.add_argument("--spares", type=int, help="hosts that wait; by default 3, and none for an elastic job")
    parser.add_argument("--grow-wait", type=float, default=1.0, help="--grow-wait of the launcher")
    parser.add_argument("--candidates", type=int, default=3, help="hosts that the controller may be on, the first ones")
    parser.add_argument("--iterations", type=int, default=80, help="of each run")
    parser.add_argument("--silence", type=float, default=15.0, help="--silence-timeout of the launcher")
    parser.add_argument("--max-wait", type=float, default=90.0, help="--max-wait of the launcher")
    parser.add_argument("--patience", type=float, default=30.0, help="--patience of the launcher")
    parser.add_argument("--still", type=float, default=240.0, help="seconds that iterations are waited for at a step")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which a run hangs")
    parser.add_argument("--keep", type=Path, help="directory for the files of runs; by default a temporary one")
    parser.add_argument("--append", action="store_true", help="keep the rows that --output has, but those run now")
    own = parser.parse_args(arguments)
    usual = (elastic.HOSTS, 0) if own.layout == "elastic" else (2, 3)
    own.nnodes, own.spares = own.nnodes or usual[0], usual[1] if own.spares is None else own.spares
    rows = scenarios(own.nnodes, own.nnodes + own.spares, own.silence)
    if unknown := set(own.only or ()) - rows.keys():
        parser.error(f"--only: no row {', '.join(sorted(unknown))}; see --list")
    own.rows = {name: rows[name] for name in own.only or rows}
    return own


def _without_faults(own: argparse.Namespace, directory: Path) -> End:
    """Returns the result of the job without faults; cached in the directory of the runs' files."""
    known = directory / f"expected_{own.layout}_{own.iterations}.json"
    if not known.exists():
        nothing, ended = trial(own, Scenario("nothing", ()), "nothing", "disk", directory / "nothing")
        if nothing.wrong or not ended.hashes:
            why = nothing.wrong or "no last snapshot"
            raise RuntimeError(f"the run without faults failed: {why} (see {directory})")
        known.write_text(json.dumps(vars(ended)))
    return End(**json.loads(known.read_text()))


def _plain(end: End) -> End:
    """Returns the same with keys that JSON supports."""
    losses = {str(iteration): list(values) for iteration, values in end.losses.items()}
    return End(losses, {str(box): digest for box, digest in end.hashes.items()})


def _write(own: argparse.Namespace, rows: list[Row]) -> None:
    told = [asdict(row) for row in rows]
    if own.append and own.output.exists():
        mine = {(row.scenario, row.tier) for row in rows}
        old = json.loads(own.output.read_text())["rows"]
        told = [row for row in old if (row["scenario"], row["tier"]) not in mine] + told
    left_out = ("rows", "output", "keep", "append", "list", "only", "tiers")
    flags = {name: value for name, value in vars(own).items() if name not in left_out}
    failed = sum(bool(row["wrong"]) for row in told)
    whole = {"machine": {"cpus": os.cpu_count()}, "flags": flags, "rows": told, "failed": failed}
    write_json(own.output, whole)


def main() -> int:
    """Runs all rows; returns 1 if any failed."""
    own = parse()
    if own.list:
        print("\n".join(f"{name:30} {row.what}" for name, row in own.rows.items()))
        return 0
    if reason := unusable():
        print(f"skipped: {reason}")
        return 0
    if _ALONE not in os.environ:  # mounts then end with this process, in any case
        os.execvpe("unshare", ["unshare", "--mount", sys.executable, *sys.argv], os.environ | {_ALONE: "1"})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the exit handlers thaw the storage
    directory = own.keep or Path(tempfile.mkdtemp(prefix="cluster-faults-"))
    expected, rows = _without_faults(own, directory), []
    for tier in own.tiers:
        for name, scenario in own.rows.items():
            row, _ = trial(own, scenario, name, tier, directory / f"{tier}, {name}".replace(" ", "_"), expected)
            rows.append(row)
            what = "EQUAL" if not row.wrong else f"FAILED: {'; '.join(row.wrong)}"
            took = f"{row.seconds:6.1f} s, stood still {row.stood_still_s:5.1f} s"
            print(f"{name:30} {tier:8} {took}  {what}", flush=True)
            if own.output is not None:
                _write(own, rows)
    if own.keep is None and not any(row.wrong for row in rows):
        shutil.rmtree(directory)
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
