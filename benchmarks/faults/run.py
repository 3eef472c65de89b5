"""One job that faults are met in: started, disturbed from outside, and looked at when it has ended."""

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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.faults.recovery import LONG, SHORT, During, Recoveries
from benchmarks.live.job import KIND, ROOT, SHARED, WORKER, Events, free_ports, reader_of, running
from moc.inspect.verify import check_coverage, check_hashes, examine
from moc.store.storage import LocalPlace
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
"""Memory has room for the gradients of all experts, copies for those of half of them."""
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
"""Tiers of snapshots: of everything, sparse, and partial."""
LOSSY = tuple(name for name, flags in TIERS.items() if "pec" in flags or "selective" in flags)
"""Those after which a run may go on with experts of different iterations; then it ends with other bits."""
STOPPED_S = 3.0  # for which a replica server is stopped: its sockets stay open, and nothing comes


def fits(layout: str, tier: str) -> bool:
    """Whether a layout can have a tier: what is logged upstream is what passes between stages."""
    return "PP" in layout or "sparse" not in tier


def nodes_of(layout: str, tier: str) -> int:
    """Nodes that a run has: two, but where both would hold the same state, which the memory tiers refuse."""
    return 1 if layout == "DP4, replicated" and tier != "disk" else 2


@dataclass(frozen=True)
class End:
    """How a run ended: by iteration its losses and norms, by tensor and region the hash in the last snapshot."""

    losses: dict
    hashes: dict


def end_of(snapshots: Path, iterations: int, events: Events) -> End:
    """What a run of so many iterations has come to, by its events and its last snapshot."""
    lines = {event["iteration"]: (event["loss"], event["grad_norm"]) for event in events.of("iteration")}
    store = Store(LocalPlace(snapshots))
    if store.iterations()[-1:] != [iterations]:
        return End(lines, {})
    sources = reader_of(store, iterations).sources()
    return End(lines, {(one.entry.name, one.entry.slot, one.entry.region): one.digest for one in sources})


def differences(ended: End, expected: End) -> list[str]:
    """In what a run has ended otherwise than it should, a sentence each."""
    wrong = []
    if ended.losses != expected.losses:
        differ = sorted(i for i, values in expected.losses.items() if ended.losses.get(i) != values)
        wrong.append(f"losses differ in iterations {differ[:5]}")
    if ended.hashes != expected.hashes:
        boxes = ended.hashes.keys() | expected.hashes.keys()
        differ = sum(ended.hashes.get(box) != expected.hashes.get(box) for box in boxes)
        wrong.append(f"{differ} of {len(boxes)} tensors differ")
    return wrong


def missing(ended: End, expected: End) -> list[str]:
    """What a run has not told or saved that it should have, whatever its bits are; a sentence each."""
    wrong = []
    if ended.losses.keys() != expected.losses.keys():
        wrong.append(f"iterations {sorted(expected.losses.keys() ^ ended.losses.keys())[:5]} are not told")
    if not ended.hashes or ended.hashes.keys() - expected.hashes.keys():
        wrong.append("the last snapshot is not there, or not of this model")
    return wrong


def mistakes(ended: End, expected: End, events: Events) -> list[str]:
    """In what a run with partial snapshots has ended otherwise than it should; bits count where nothing was stale."""
    loaded = [event for event in events.of("resume") if event["sources"]]
    wrong = missing(ended, expected) if any(event["stale"] for event in loaded) else differences(ended, expected)
    if len(loaded) > len(events.of("lost")):
        wrong.append(f"{len(loaded)} recoveries, but {len(events.of('lost'))} times lost tokens were counted")
    return wrong


def judge(tier: str, ended: End, expected: End, events: Events) -> list[str]:
    """In what a run with a tier of :data:`TIERS` has ended otherwise than it should, a sentence each."""
    return mistakes(ended, expected, events) if tier in LOSSY else differences(ended, expected)


def damages(snapshots: Path) -> list[str]:
    """What is wrong with the last snapshot in storage, by what verifies checkpoints."""
    verdicts = examine(snapshots, None, False)
    check_hashes(verdicts, 1)
    for verdict in verdicts:
        check_coverage(verdict)
    return [f"{verdict.path.name}: {problem}" for verdict in verdicts for problem in verdict.problems]


@dataclass(frozen=True)
class Outside:
    """What is done to a job from outside, as soon as an iteration is complete.

    ``node`` (it is lost, and comes back empty), ``agent`` (killed, and its node's processes with it), ``controller``
    (killed), ``replica_server`` (stopped for a while) or ``folder`` (killed).
    """

    action: str
    iteration: int  # after which
    node: int = -1  # whose; -1 for the last one

    def __str__(self) -> str:
        return f"{self.action} {self.node} at {self.iteration}, outside"


def standing(processes: Iterable[psutil.Process]) -> list[str]:
    """A line for each process: its number, its state, the program, and what its threads wait for in the kernel."""
    return [line for process in processes if (line := _line(process))]


def _line(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        words = process.cmdline()
        program = next((words[i + 1] for i, word in enumerate(words[:-1]) if word == "-m"), " ".join(words[:2]))
        return f"{process.pid} {process.status()} {program}: {_waits(process.pid)}"
    return ""


def _waits(pid: int) -> str:
    """By what threads wait for, how many do."""
    counts: dict[str, int] = {}
    for thread in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(OSError):
            name = (thread / "wchan").read_text() or "running"
            counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{name} x{count}" if count > 1 else name for name, count in counts.items())


class Run:
    """One job, in a directory of its own.

    Args:
        own: flags of the benchmark.
        layout: one of :data:`LAYOUTS`.
        tier: one of :data:`TIERS`.
        directory: for its files; made.
        faults: flags that name them.
        candidates: nodes that may have the controller; with more than one, a spare has one, too.

    Attributes:
        wrong: what it should not have done.
        left: what it has left.
        stand: if it hung, what its processes did then.
        done: what was done to it from outside.
    """

    def __init__(
        self, own: argparse.Namespace, layout: str, tier: str, directory: Path, faults: list, candidates: int = 1
    ):
        self.directory, self._own, self.wrong, self.done = directory, own, [], []
        self.left: list[str] = []
        self.stand: list[str] = []
        self._memory = Path(tempfile.mkdtemp(prefix="random-faults-", dir=SHARED))
        directory.mkdir(parents=True)
        self.events, self._seen, self._iteration = Events(directory / "events.jsonl"), 0, 0
        size, parallel = LAYOUTS[layout]
        places = ["--ckpt-dir", directory / "snapshots", "--ckpt-memory-dir", self._memory, "--log-dir", directory]
        self._nodes, self._has_copies = nodes_of(layout, tier), "peers" in TIERS[tier]
        launcher = ["-m", "moc.launch", "--nproc-per-node", size // self._nodes, "--silence-timeout", own.silence]
        self._spares = max(0, candidates - self._nodes) if candidates > 1 else 0
        self._all_nodes = range(self._nodes + self._spares)
        if self._nodes > 1:
            addresses = ",".join(f"127.0.0.1:{port}" for port in free_ports(candidates))
            launcher += ["--nnodes", self._nodes, "--spares", self._spares, "--rdzv-endpoint", addresses]
        program = [ROOT / own.program, *MODEL, "--train-iters", own.iterations]
        self._launcher = [sys.executable, "-W", "ignore", *map(str, launcher)]
        self._program = list(map(str, [*program, *parallel.split(), *TIERS[tier].split(), *places, *faults]))
        self._token = secrets.token_hex(32)
        self._launchers: list[subprocess.Popen] = []
        self._stopped: list[tuple[float, psutil.Process]] = []

    def to_its_end(self, disturbances: tuple[Outside, ...] = (), recoveries: Recoveries | None = None) -> float:
        """Runs it, and notes in ``wrong`` what it should not have done; seconds.

        Args:
            disturbances: what is done to it between iterations.
            recoveries: what is done to it while it recovers.
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
        """Whether it has ended: well on one node, or somehow on the first of one candidate, or on all."""
        codes = [launcher.poll() for launcher in self._launchers]
        return 0 in codes or None not in codes or (not self._spares and codes[0] is not None)

    def end(self) -> End:
        """What it has come to."""
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
        """The last iteration that is complete."""
        new = self.events.all()[self._seen :]
        self._seen += len(new)
        self._iteration = max([self._iteration, *(e["iteration"] for e in new if e["type"] == "iteration")])
        return self._iteration

    def kill_worker(self, rank: int) -> bool:
        """Kills a worker; whether there was one."""
        said = (self.directory / "console").read_text(errors="replace")
        numbers = [int(number) for other, number in WORKER.findall(said) if int(other) == rank]
        with contextlib.suppress(IndexError, ProcessLookupError):
            os.kill(numbers[-1], signal.SIGKILL)
            return True
        return False

    def disturb_recovery(self, what: During) -> bool:
        """Does something to a process of the job; whether there was one."""
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
        """A launcher that has lost what it cannot do without ends, and its command is started again."""
        for node in self._all_nodes if self._spares else range(1, self._nodes):
            if self._launchers[node].poll() not in (None, 0) and not self._over():
                self._launchers[node] = self._start(node)

    def _disturb(self, what: Outside) -> bool:
        """Whether there was somebody to do it to."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return getattr(self, f"_{what.action}")(what.node % self._nodes)
        return False

    def _node(self, node: int) -> bool:
        """A machine is gone, with what was in its memory; the same command is started again, on an empty one.

        Not before there is a snapshot elsewhere: without one the job is over.
        """
        if not self._has_copies and not Store(LocalPlace(self.directory / "snapshots")).iterations():
            return False
        self._end(node, self._of(node))
        for path in [*self._memory.glob(f"*/*-node-{node}")] if self._nodes > 1 else self._memory.iterdir():
            shutil.rmtree(path)
        self._launchers[node] = self._start(node)
        return True

    def _agent(self, node: int) -> bool:
        """A launcher is killed, and all dies that dies with it; the same command is started again."""
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
        shutil.rmtree(self._temporary(node))  # nobody is left who could tidy it up

    def _controller(self, _: int) -> bool:
        controllers = self._running(0, "controller")
        for process in controllers:
            process.kill()
        return bool(controllers)

    def _replica_server(self, node: int) -> bool:
        """What keeps copies on a node does not answer for a while, though its sockets stay open."""
        replica_servers = self._running(node, "replica_server")
        for process in replica_servers:
            self._pause(process, STOPPED_S)
        return bool(replica_servers)

    def _folder(self, node: int) -> bool:
        """What folds experts' gradients on a node is killed, whatever it is doing."""
        folders = [process for process in self._of(node) if "moc.session.folder" in process.cmdline()]
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
        """All processes of a node, its launcher first."""
        launcher = psutil.Process(self._launchers[node].pid)
        return [launcher, *launcher.children(recursive=True)]

    def _running(self, node: int, who: str) -> list[psutil.Process]:
        return running(self._launchers[node].pid, f"moc.runtime.{who}")

    def _temporary(self, node: int) -> Path:
        return self.directory / f"tmp{node}"

    def _look_for_leftovers(self) -> None:
        time.sleep(0.5)  # the kernel takes a moment to end what has lost its parent
        mine = [p for p in psutil.process_iter(["cmdline"]) if str(self.directory) in " ".join(p.info["cmdline"] or ())]
        self.left += [f"process {process.pid} is left" for process in mine]
        for process in mine:
            process.kill()
        memory = [path for path in self._memory.rglob("*") if path.is_file() and path.stat().st_size]
        self.left += [f"{path} is left" for path in [*memory, *self.directory.glob("tmp*/mocrun-*")]]
        shutil.rmtree(self._memory)
