"""Runs a training job that a benchmark observes: its events, output, processes and memory."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from moc.files.event_log import EventFollower
from moc.store.shard_file import ShardReader
from moc.store.store import Store, checkpoint_name

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path("/dev/shm")
PROGRAM = str(ROOT / "pretrain_gpt_moe.py")
PATIENCE_S = 180.0
POLL_S = 0.002
KIND = """--num-layers 4 --num-attention-heads 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01
    --moe-token-dispatcher-type alltoall --position-embedding-type rope --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --mock-data --tokenizer-type NullTokenizer --transformer-impl local
    --eval-iters 0 --num-workers 0""".split()
"""Flags that the models of most benchmarks share."""
SIZES = """--hidden-size 64 --ffn-hidden-size 96 --num-experts 8 --seq-length 64 --max-position-embeddings 64
    --vocab-size 255 --use-distributed-optimizer --micro-batch-size 1 --global-batch-size 8 --lr 1e-3
    --train-iters 100000""".split()
MODEL = [*KIND, *SIZES]
"""Flags of a model so small that its computation does not dominate the measurement."""
EP2 = ["--expert-model-parallel-size", "2"]
ZERO2 = ("--no-use-distributed-optimizer", "--deepspeed", "--zero-stage", "2")
"""DeepSpeed's engine, in place of megatron-core's ZeRO-1."""
PP2_EP2 = ["--pipeline-model-parallel-size", "2", *EP2]
IN_MEMORY = "--ckpt-policy full --ckpt-tier memory --snapshot-interval 1".split()

WORKER = re.compile(r"worker (\d+) is process (\d+)")
"""Pattern of the launcher's line about a worker: rank and PID."""


def launcher(workers: int) -> list[str]:
    """Returns the command of our launcher on one node."""
    return ["-m", "moc.launch", "--nproc-per-node", str(workers)]


def torchrun(workers: int) -> list[str]:
    """Returns the command of torchrun on one node, which restarts all workers when one is lost."""
    return f"-m torch.distributed.run --standalone --nproc-per-node {workers} --max-restarts 10000".split()


def free_ports(count: int) -> list[int]:
    """Returns distinct loopback ports that are currently free."""
    with contextlib.ExitStack() as all_at_once:
        probes = [all_at_once.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def running(launcher: int, module: str) -> list[psutil.Process]:
    """Returns child processes of a launcher that run a module; workers forked from them have its command line too."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(launcher).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [process] if module in process.cmdline() else []
    return found


def reader_of(store: Store, iteration: int) -> ShardReader:
    """Returns a reader of all regions of a snapshot.

    Raises:
        moc.store.errors.CheckpointError: the snapshot does not exist.
    """
    names = store.read_manifest(iteration).files
    return ShardReader(store.storage.open_blob(f"{checkpoint_name(iteration)}/{name}") for name in names)


def look(process: psutil.Process) -> dict[str, float]:
    """Returns the resources of a process: unique (USS) and resident memory in MiB, threads and descriptors."""
    memory = process.memory_full_info()
    counts = {"threads": process.num_threads(), "descriptors": process.num_fds()}
    return {"uss_mb": memory.uss / 2**20, "rss_mb": memory.rss / 2**20, **counts}


class Events:
    """A growing ``events.jsonl``, read incrementally; incomplete lines of killed workers are skipped."""

    def __init__(self, path: Path):
        self.path, self._follower, self._all = path, EventFollower(path), []

    def all(self) -> list[dict]:
        """Returns every event so far, in order."""
        while self.path.exists() and (new := self._follower.read()):
            self._all += new
        return self._all

    def of(self, kind: str) -> list[dict]:
        """Returns the events of a kind so far, in order."""
        return [event for event in self.all() if event["type"] == kind]


class Job:
    """A job on this machine, as a context manager that leaves only its directory behind.

    Args:
        command: the launcher, the program and its flags, as arguments of Python.
        directory: empty directory for the job's files.
        saves: whether the job keeps snapshots in its directory and in shared memory.
        keep: whether to keep a line of the job's output; by default, all lines are kept.
        environment: additional environment variables.
        python: the interpreter.
        log: directory for events; by default in the job's directory.

    Attributes:
        events: events of the job.
        said: lines of output, with the Unix time of arrival.
        process: the launcher.
        memory: the job's directory in shared memory, which is removed at the end.
    """

    def __init__(
        self,
        command: Sequence[object],
        directory: str | Path,
        saves: bool = False,
        keep: Callable[[str], bool] = lambda _: True,
        environment: dict[str, str] | None = None,
        python: str = sys.executable,
        log: Path | None = None,
    ):
        directory = Path(directory)
        log = log or directory / "log"
        self.events, self.said = Events(log / "events.jsonl"), []
        self.memory, self._saves, self._keep = SHARED / directory.name, saves, keep
        if saves:
            self.memory.mkdir()
            command = [*command, "--ckpt-dir", directory / "snapshots", "--ckpt-memory-dir", self.memory]
        command = [*command, "--log-dir", log]
        alike = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [python, "-W", "ignore", *map(str, command)],
            cwd=directory,  # with two checkouts, Python would import from its working directory
            env=os.environ | alike | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> Job:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that __exit__ runs
        return self

    def __exit__(self, *_) -> None:
        if self.process.poll() is None:
            for one in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)
        self.process.wait()
        self._listener.join()
        if self._saves:
            shutil.rmtree(self.memory)

    def wait_for(self, ready: Callable, what: str):
        """Waits until ``ready`` returns a true value, and returns it.

        Raises:
            RuntimeError: :data:`PATIENCE_S` has passed, or the job has ended.
        """
        deadline = time.time() + PATIENCE_S
        while not (answer := ready()):
            if time.time() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"{what} was not reached; last output of the job:\n{self.last_words()}")
            time.sleep(POLL_S)
        return answer

    def reach(self, iteration: int) -> None:
        """Waits until an iteration is complete."""
        self.wait_for(lambda: self.iteration >= iteration, f"iteration {iteration}")

    @property
    def iteration(self) -> int:
        """The last complete iteration; 0 before the first."""
        return next((e["iteration"] for e in reversed(self.events.all()) if e["type"] == "iteration"), 0)

    def workers(self) -> dict[int, int]:
        """Returns the PIDs of the workers: by rank under our launcher, otherwise in any order."""
        if found := {int(told[1]): int(told[2]) for _, line in self.said if (told := WORKER.search(line))}:
            return found
        return {i: child.pid for i, child in enumerate(psutil.Process(self.process.pid).children())}

    def last_words(self) -> str:
        """Returns the last lines of the job's output."""
        return "\n".join(line for _, line in self.said[-40:])

    def _listen(self) -> None:
        for line in self.process.stdout or ():
            if self._keep(line):
                self.said.append((time.time(), line.rstrip()))
