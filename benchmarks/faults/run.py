"""Runs one job, injects faults from outside, and checks its results and leftovers."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.faults.drawn import ONE_NODE, SMALL_LAYOUTS
from benchmarks.faults.recovery import LONG, SHORT, During, Recoveries
from benchmarks.live.job import KIND, ROOT, SHARED, WORKER, Events, free_ports, reader_of, running
from moc.inspect.verify import check_coverage, check_hashes, open_verdicts
from moc.store.storage import LocalStorage
from moc.store.store import Store

SIZES = """--hidden-size 64 --ffn-hidden-size 96 --num-experts 8 --seq-length 32 --vocab-size 255 --micro-batch-size 1
    --global-batch-size 8 --lr 1e-2 --clip-grad 0.3 --log-interval 1""".split()
MODEL = [*KIND, *SIZES]
ZERO, PP2, EP2 = "--use-distributed-optimizer", "--pipeline-model-parallel-size 2", "--expert-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
LAYOUTS = {  # name: (workers, flags)
    "DP4xEP2": (4, f"{ZERO} {EP2}"),
    "PP2xEP2": (4, f"{ZERO} {PP2} {EP2}"),
    "PP2xDP2": (4, f"{ZERO} {PP2}"),
    "TP2xEP2": (4, f"{ZERO} {TP2} {EP2}"),
    "DP4, replicated": (4, ""),
    "PP2xEP2, replicated": (4, f"{PP2} {EP2}"),
    "PP2, interleaved": (2, f"{ZERO} {PP2} --num-virtual-stages-per-pipeline-rank 2"),
    "PP4": (4, f"{ZERO} --pipeline-model-parallel-size 4"),
    "PP2xTP2": (4, f"{ZERO} {PP2} --tensor-model-parallel-size 2 --sequence-parallel"),
    "DP4xEP2, DeepSpeed": (4, f"--deepspeed --zero-stage 2 {EP2}"),
    "PP2xEP2, DeepSpeed": (4, f"--deepspeed {PP2} {EP2}"),
}
SPARSE = "--ckpt-policy sparse --sparse-window 3 --upstream-logging --max-snapshot-lag 1"
GRADIENT = "--ckpt-policy gradient --gradient-window 3"
PEC = "--ckpt-policy pec --pec-k 2"
SELECTIVE = "--ckpt-policy selective --selective-experts 2"
EVERY = "--ckpt-policy selective --selective-experts 8"
IN_MEMORY = "--ckpt-tier memory --snapshot-interval 1 --persist-interval 4"
IN_PEERS = "--ckpt-tier peers --snapshot-interval 1 --persist-interval 4"
FEWER = f"--ckpt-policy selective --selective-local-gb 0.0016 --selective-remote-gb 0.0012 {IN_PEERS}"
"""Flags with memory for the gradients of all experts, and peer copies for the gradients of half of them."""
TIERS = {
    "memory": "--ckpt-policy full --ckpt-tier memory --snapshot-interval 1 --persist-interval 4",
    "disk": "--ckpt-policy full --ckpt-tier disk --snapshot-interval 2",
    "peers": "--ckpt-policy full --ckpt-tier peers --snapshot-interval 1 --persist-interval 4",
    "sparse": f"{SPARSE} --ckpt-tier memory --persist-interval 1",
    "sparse, disk": f"{SPARSE} --ckpt-tier disk",
    "sparse, peers": f"{SPARSE} --ckpt-tier peers --persist-interval 6",
    "gradient": f"{GRADIENT} --ckpt-tier memory --persist-interval 4",
    "gradient, peers": f"{GRADIENT} --ckpt-tier peers --persist-interval 4",
    "pec": f"{PEC} --ckpt-tier memory --snapshot-interval 1 --persist-interval 4",
    "pec, peers": f"{PEC} --ckpt-tier peers --snapshot-interval 1 --persist-interval 4",
    "selective": f"{SELECTIVE} {IN_MEMORY}",
    "selective, disk": f"{SELECTIVE} --ckpt-tier disk --snapshot-interval 2",
    "selective, peers": f"{SELECTIVE} {IN_PEERS}",
    "selective, states": f"{SELECTIVE} {IN_MEMORY} --selective-gradients off",
    "selective, kept": f"{SELECTIVE} {IN_MEMORY} --selective-survivors keep",
    "selective, all": f"{EVERY} {IN_MEMORY}",
    "selective, all, peers": f"{EVERY} {IN_PEERS}",
    "selective, all, kept": f"{EVERY} {IN_PEERS} --selective-survivors keep",
    "selective, all, folded": f"{EVERY} {IN_PEERS} --selective-fold peers",
    "selective, fewer copies": FEWER,
    "selective, fewer copies, states": f"{FEWER} --selective-gradients off",
    "selective, fewer copies, kept": f"{FEWER} --selective-survivors keep",
}
"""Flags of full, sparse and partial snapshots in several tiers."""
LOSSY = tuple(name for name, flags in TIERS.items() if "pec" in flags or "selective" in flags)
"""Tiers that may let a run resume from experts of different iterations; then its final bits differ."""
STOPPED_S = 3.0  # seconds that a replica server is stopped: its sockets stay open, but do not answer


def fits(layout: str, tier: str) -> bool:
    """Returns whether a layout can have a tier: upstream logging needs pipeline stages."""
    return "PP" in layout or "sparse" not in tier


def nodes_of(layout: str, tier: str) -> int:
    """Returns the number of nodes: two, unless both would hold the same state, which the memory tiers refuse."""
    return 1 if layout == ONE_NODE or (layout == "DP4, replicated" and tier != "disk") else 2


@dataclass(frozen=True)
class End:
    """Final state of a run.

    Attributes:
        losses: losses and norms by iteration.
        hashes: hashes in the last snapshot by tensor and region.
        evaluations: iteration, split and loss of each evaluation.
    """

    losses: dict
    hashes: dict
    evaluations: frozenset = frozenset()


def end_of(snapshots: Path, iterations: int, events: Events) -> End:
    """Returns the final state of a run of ``iterations`` iterations, from its events and its last snapshot."""
    lines = {event["iteration"]: (event["loss"], event["grad_norm"]) for event in events.of("iteration")}
    store = Store(LocalStorage(snapshots))
    evaluations = frozenset((event["iteration"], event["split"], event["loss"]) for event in events.of("evaluation"))
    if store.iterations()[-1:] != [iterations]:
        return End(lines, {}, evaluations)
    sources = reader_of(store, iterations).sources()
    return End(lines, {(one.box.name, one.box.slot, one.box.region): one.digest for one in sources}, evaluations)


def differences(ended: End, expected: End) -> list[str]:
    """Returns the differences between the actual and the expected end of a run, one sentence each."""
    wrong = []
    if ended.losses != expected.losses:
        differ = sorted(i for i, values in expected.losses.items() if ended.losses.get(i) != values)
        wrong.append(f"losses differ in iterations {differ[:5]}")
    if ended.evaluations != expected.evaluations:
        differ = sorted({at for at, _, _ in ended.evaluations ^ expected.evaluations})
        wrong.append(f"evaluations differ after iterations {differ[:5]}")
    if ended.hashes != expected.hashes:
        boxes = ended.hashes.keys() | expected.hashes.keys()
        differ = sum(ended.hashes.get(box) != expected.hashes.get(box) for box in boxes)
        wrong.append(f"{differ} of {len(boxes)} tensors differ")
    return wrong


def missing(ended: End, expected: End) -> list[str]:
    """Returns missing events and snapshots of a run, regardless of its bits, one sentence each."""
    wrong = []
    if ended.losses.keys() != expected.losses.keys():
        wrong.append(f"iterations {sorted(expected.losses.keys() ^ ended.losses.keys())[:5]} are not reported")
    if not ended.hashes or ended.hashes.keys() - expected.hashes.keys():
        wrong.append("the last snapshot is not there, or not of this model")
    return wrong


def mistakes(ended: End, expected: End, events: Events) -> list[str]:
    """Returns errors of a run with partial snapshots; compares bits if no loaded state was stale."""
    loaded = [event for event in events.of("resume") if event["sources"]]
    wrong = missing(ended, expected) if any(event["stale"] for event in loaded) else differences(ended, expected)
    if len(loaded) > len(events.of("lost")):
        wrong.append(f"{len(loaded)} recoveries, but {len(events.of('lost'))} times lost tokens were counted")
    return wrong


def judge(tier: str, ended: End, expected: End, events: Events) -> list[str]:
    """Returns the errors of a run with a tier of :data:`TIERS`, one sentence each."""
    return mistakes(ended, expected, events) if tier in LOSSY else differences(ended, expected)


def damages(snapshots: Path) -> list[str]:
    """Returns the problems that the checkpoint verifier finds in the last stored snapshot, one sentence each."""
    verdicts = open_verdicts(snapshots, None, False)
    check_hashes(verdicts, 1)
    for verdict in verdicts:
        check_coverage(verdict)
    return [f"{verdict.path.name}: {problem}" for verdict in verdicts for problem in verdict.problems]


@dataclass(frozen=True)
class Outside:
    """A fault that is injected from outside, as soon as an iteration is complete.

    Actions are ``node`` (lost, and restarted empty), ``agent`` (killed together with its node's processes),
    ``controller`` (killed), ``replica_server`` (stopped for a while) and ``folder`` (killed).
    """

    action: str
    iteration: int  # the fault is injected when this iteration is complete
    node: int = -1  # number of the node; -1 for the last one

    def __str__(self) -> str:
        return f"{self.action} {self.node} at {self.iteration}, outside"


def standing(processes: Iterable[psutil.Process]) -> list[str]:
    """Returns a line for each process: PID, status, program, and the kernel functions that its threads wait in."""
    return [line for process in processes if (line := _line(process))]


def _line(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        words = process.cmdline()
        program = next((words[i + 1] for i, word in enumerate(words[:-1]) if word == "-m"), " ".join(words[:2]))
        return f"{process.pid} {process.status()} {program}: {_waits(process.pid)}"
    return ""


def _waits(pid: int) -> str:
    """Returns the kernel functions that a process's threads wait in, with the number of threads."""
    counts: dict[str, int] = {}
    for thread in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(OSError):
            name = (thread / "wchan").read_text() or "running"
            counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{name} x{count}" if count > 1 else name for name, count in counts.items())


class Run:
    """One job in a separate directory.

    Args:
        own: flags of the benchmark.
        layout: one of :data:`LAYOUTS`.
        tier: one of :data:`TIERS`.
        directory: directory for the job's files, which is created.
        faults: flags that inject faults.
        candidates: number of nodes that may run the controller; if it exceeds the job's nodes, spares are candidates.
        flags: further flags of the program.

    Attributes:
        wrong: errors of the job.
        left: leftovers of the job.
        stand: if the job hung, the state of its processes.
        done: faults that were injected from outside.
    """

    def __init__(
        self,
        own: argparse.Namespace,
        layout: str,
        tier: str,
        directory: Path,
        faults: list,
        candidates: int = 1,
        flags: Sequence[str] = (),
    ):
        self.directory, self._own, self.wrong, self.done = directory, own, [], []
        self.left: list[str] = []
        self.stand: list[str] = []
        self._memory = Path(tempfile.mkdtemp(prefix="random-faults-", dir=SHARED))
        directory.mkdir(parents=True)
        self.events, self._seen, self._iteration = Events(directory / "events.jsonl"), 0, 0
        size, parallel = (LAYOUTS | SMALL_LAYOUTS)[layout]
        places = ["--ckpt-dir", directory / "snapshots", "--ckpt-memory-dir", self._memory, "--log-dir", directory]
        self._nodes, self._has_copies = nodes_of(layout, tier), "peers" in TIERS[tier]
        launcher = ["-m", "moc.launch", "--nproc-per-node", size // self._nodes, "--silence-timeout", own.silence]
        launcher += ["--max-standstill", 1000]  # faults may strike at one iteration again and again
        self._spares = max(0, candidates - self._nodes) if candidates > 1 else 0
        self._all_nodes = range(self._nodes + self._spares)
        if self._nodes > 1:
            addresses = ",".join(f"127.0.0.1:{port}" for port in free_ports(candidates))
            launcher += ["--nnodes", self._nodes, "--spares", self._spares, "--rdzv-endpoint", addresses]
        program = [ROOT / own.program, *MODEL, "--train-iters", own.iterations]
        self._launcher = [sys.executable, "-W", "ignore", *map(str, launcher)]
        self._program = list(map(str, [*program, *parallel.split(), *TIERS[tier].split(), *flags, *places, *faults]))
        self._token = secrets.token_hex(32)
        self._launchers: list[subprocess.Popen] = []
        self._stopped: list[tuple[float, psutil.Process]] = []

    def to_its_end(self, disturbances: tuple[Outside, ...] = (), recoveries: Recoveries | None = None) -> float:
        """Runs the job, records errors in ``wrong``, and returns the seconds.

        Args:
            disturbances: faults that are injected between iterations.
            recoveries: faults that are injected during recoveries.
        """
        begun, waiting = time.monotonic(), sorted(disturbances, key=lambda one: one.iteration)
        self._launchers = [self._start(node) for node in self._all_nodes]
        while not self._over() and time.monotonic() - begun < self._own.limit:
            time.sleep(0.02)
            self._let_go_on()
            if recoveries is not None:
                recoveries.look(self)
                self._start_what_ended()
            if waiting and self.reached() >= waiting[0].iteration and self._disturb(waiting[0]):
                self.done.append(waiting.pop(0))
        over, seconds = self._over(), time.monotonic() - begun
        if not over:
            self.wrong.append(f"no end after {self._own.limit:g} s")
            self.stand = [line for node in self._all_nodes for line in standing(self._of(node))]
        for launcher in self._launchers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(10 if over else 0)
        if over and 0 not in (codes := [launcher.poll() for launcher in self._launchers]):
            self.wrong.append(f"exit codes {codes}")
        for launcher in self._launchers:
            launcher.kill()
            launcher.wait()
        self._look_for_leftovers()
        return seconds

    def _over(self) -> bool:
        """Returns whether the job has ended: with success on a node, on all nodes, or without spares on the first."""
        codes = [launcher.poll() for launcher in self._launchers]
        return 0 in codes or None not in codes or (not self._spares and codes[0] is not None)

    def end(self) -> End:
        """Returns the final state of the job."""
        return end_of(self.directory / "snapshots", self._own.iterations, self.events)

    def _start(self, node: int) -> subprocess.Popen:
        ours = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "MOC_TOKEN": self._token}
        self._temporary(node).mkdir(exist_ok=True)
        with open(self.directory / "console", "a") as console:
            return subprocess.Popen(
                [*self._launcher, "--node-rank", str(node), *self._program],
                env=os.environ | ours | {"TMPDIR": str(self._temporary(node))},
                stdout=console,
                stderr=subprocess.STDOUT,
            )

    def reached(self) -> int:
        """Returns the last complete iteration."""
        new = self.events.all()[self._seen :]
        self._seen += len(new)
        self._iteration = max([self._iteration, *(e["iteration"] for e in new if e["type"] == "iteration")])
        return self._iteration

    def kill_worker(self, rank: int) -> bool:
        """Kills a worker; returns whether it existed."""
        said = (self.directory / "console").read_text(errors="replace")
        numbers = [int(number) for other, number in WORKER.findall(said) if int(other) == rank]
        with contextlib.suppress(IndexError, ProcessLookupError):
            os.kill(numbers[-1], signal.SIGKILL)
            return True
        return False

    def disturb_recovery(self, what: During) -> bool:
        """Injects a fault into a process of the job; returns whether the process existed."""
        who, _, pauses = what.action.partition(" ")
        if who == "worker":
            return self.kill_worker(what.rank)
        if who == "launcher":
            return self._launchers[what.node].poll() is None and self._agent(what.node)
        nodes = self._all_nodes if who == "controllers" else [what.node]
        found = [one for node in nodes for one in self._running(node, who.removesuffix("s"))]
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                if pauses:
                    self._pause(process, self._own.silence * (LONG if "for long" in pauses else SHORT))
                else:
                    process.kill()
        return bool(found)

    def _pause(self, process: psutil.Process, seconds: float) -> None:
        process.send_signal(signal.SIGSTOP)
        self._stopped.append((time.monotonic() + seconds, process))

    def _start_what_ended(self) -> None:
        """Restarts the commands of launchers that have ended with an error, except on the only controller's node."""
        for node in self._all_nodes if self._spares else range(1, self._nodes):
            if self._launchers[node].poll() not in (None, 0) and not self._over():
                self._launchers[node] = self._start(node)

    def _disturb(self, what: Outside) -> bool:
        """Injects a fault; returns whether its target existed."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return getattr(self, f"_{what.action}")(what.node % self._nodes)
        return False

    def _node(self, node: int) -> bool:
        """Loses a machine with its memory, and restarts the same command on an empty machine.

        Does nothing until there is a snapshot elsewhere, since the job cannot continue without one.
        """
        if not self._has_copies and not Store(LocalStorage(self.directory / "snapshots")).iterations():
            return False
        self._end(node, self._of(node))
        for path in [*self._memory.glob(f"*/*-node-{node}")] if self._nodes > 1 else self._memory.iterdir():
            shutil.rmtree(path)
        self._launchers[node] = self._start(node)
        return True

    def _agent(self, node: int) -> bool:
        """Kills a launcher, which ends its node's processes, and restarts the same command."""
        self._end(node, self._of(node)[:1])
        self._launchers[node] = self._start(node)
        return True

    def _end(self, node: int, killed: list[psutil.Process]) -> None:
        processes = self._of(node)
        for process in killed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._launchers[node].wait()
        if psutil.wait_procs(processes, timeout=30)[1]:
            self.wrong.append(f"node {node} has outlived its launcher")
        shutil.rmtree(self._temporary(node))  # a killed launcher does not clean up

    def _controller(self, _: int) -> bool:
        controllers = self._running(0, "controller")
        for process in controllers:
            process.kill()
        return bool(controllers)

    def _replica_server(self, node: int) -> bool:
        """Stops the replica server of a node for a while; its sockets stay open."""
        replica_servers = self._running(node, "replica_server")
        for process in replica_servers:
            self._pause(process, STOPPED_S)
        return bool(replica_servers)

    def _folder(self, node: int) -> bool:
        """Kills the background optimizer of experts' gradients on a node."""
        folders = [
            process
            for process in self._of(node)
            if "moc.session.node_service" in process.cmdline() and "fold" in process.cmdline()
        ]
        for process in folders:
            process.kill()
        return bool(folders)

    def _let_go_on(self) -> None:
        for until, process in list(self._stopped):
            if time.monotonic() >= until:
                self._stopped.remove((until, process))
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)

    def _of(self, node: int) -> list[psutil.Process]:
        """Returns all processes of a node, its launcher first."""
        launcher = psutil.Process(self._launchers[node].pid)
        return [launcher, *launcher.children(recursive=True)]

    def _running(self, node: int, who: str) -> list[psutil.Process]:
        return running(self._launchers[node].pid, f"moc.runtime.{who}")

    def _temporary(self, node: int) -> Path:
        return self.directory / f"tmp{node}"

    def _look_for_leftovers(self) -> None:
        time.sleep(0.5)  # the kernel takes a moment to end processes that have lost their parent
        mine = [p for p in psutil.process_iter(["cmdline"]) if str(self.directory) in " ".join(p.info["cmdline"] or ())]
        self.left += [f"process {process.pid} is left" for process in mine]
        for process in mine:
            process.kill()
        memory = [path for path in self._memory.rglob("*") if path.is_file() and path.stat().st_size]
        self.left += [f"{path} is left" for path in [*memory, *self.directory.glob("tmp*/mocrun-*")]]
        shutil.rmtree(self._memory)
