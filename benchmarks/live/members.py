"""Runs a job of MIN to MAX nodes on this machine, whose nodes can be lost and restarted during training."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from benchmarks.live.job import ROOT, WORKER, Events, Job, free_ports


@contextmanager
def _controller(flags: Sequence[object], token: str) -> Iterator[None]:
    command = [sys.executable, "-m", "moc.runtime.controller", *map(str, flags)]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT), "MOC_TOKEN": token})
    try:
        yield
    finally:
        process.kill()
        process.wait()


class Nodes:
    """The launchers of a job, one per node, with separate temporary files and a common event log.

    Args:
        program: program of the workers, with its flags.
        files: directory for the files of the job.
        stack: exit stack that ends the job; only its files remain.
        launcher: flags of the launcher, including ``--nnodes``; without candidates, only flags that a controller has.
        nodes: number of nodes that are started.
        candidates: number of nodes that may run the controller; with 0, the controller runs outside of the nodes.

    Attributes:
        events: events of the job.
        jobs: launcher by node; the launchers of lost nodes have ended.
        present: nodes that are not lost.
        consoles: lines of launchers that have ended.
    """

    def __init__(
        self,
        program: Sequence[object],
        files: Path,
        stack: ExitStack,
        launcher: Sequence[object],
        nodes: int,
        candidates: int = 1,
    ):
        addresses = ",".join(f"127.0.0.1:{port}" for port in free_ports(candidates or 1))
        self._launcher = ["-m", "moc.launch", *launcher, "--rdzv-endpoint", addresses]
        self._program, self._files, self._stack = list(program), files, stack
        self._token = secrets.token_hex(32)
        if not candidates:
            self._launcher.append("--no-controller")
            stack.enter_context(_controller(["--listen", addresses, *launcher], self._token))
        self.log = files / "log"
        self.events = Events(self.log / "events.jsonl")
        self.present: set[int] = set()
        self.jobs: dict[int, Job] = {}
        self.consoles: list[str] = []
        for node in range(nodes):
            self.start(node)

    def start(self, node: int) -> None:
        """Starts or restarts a node."""
        directory = self._files / f"{node}-{time.monotonic_ns()}"
        self.temporary(node).mkdir(exist_ok=True)
        directory.mkdir()
        command = [*self._launcher, "--node-rank", node, *self._program]
        environment = {"MOC_TOKEN": self._token, "TMPDIR": str(self.temporary(node)), "CUDA_VISIBLE_DEVICES": ""}
        job = Job(command, directory, environment=environment, log=self.log)
        self.jobs[node] = self._stack.enter_context(job)
        self.present.add(node)

    def temporary(self, node: int) -> Path:
        """Returns the directory for temporary files of a node."""
        return self._files / f"tmp{node}"

    def lose(self, node: int, at_once: bool = True) -> None:
        """Kills all processes of a node, or only its launcher, whose end ends the others; removes its files."""
        job = self.jobs[node]
        launcher = psutil.Process(job.process.pid)
        of_node = [launcher, *launcher.children(recursive=True)]
        for process in of_node if at_once else [launcher]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        job.process.wait()
        psutil.wait_procs(of_node[1:], timeout=30)
        self.consoles += [f"{moment:.3f} node {node}: {line}" for moment, line in job.said]
        shutil.rmtree(self.temporary(node), ignore_errors=True)  # a killed launcher does not clean up
        self.present.discard(node)

    def ask_to_leave(self, node: int) -> None:
        """Sends the launcher of a node SIGTERM, as a spot notice does."""
        self.jobs[node].process.send_signal(signal.SIGTERM)
        self.present.discard(node)

    def left_with(self, node: int) -> int:
        """Waits for the end of a node that was asked to leave, and returns the exit code of its launcher."""
        job = self.jobs[node]
        code = job.process.wait()
        self.consoles += [f"{moment:.3f} node {node}: {line}" for moment, line in job.said]
        return code

    def worker(self, node: int, local: int = 0, per_node: int = 1) -> psutil.Process | None:
        """Returns the newest process of a worker of a node; None if there was none."""
        told = [found for _, line in list(self.jobs[node].said) if (found := WORKER.search(line))]
        numbers = [int(one[2]) for one in told if int(one[1]) % per_node == local]
        with suppress(psutil.NoSuchProcess, IndexError):
            return psutil.Process(numbers[-1])
        return None

    def console(self) -> str:
        """Returns the lines of all launchers, in order of time."""
        now = [f"{moment:.3f} node {node}: {line}" for node, job in self.jobs.items() for moment, line in job.said]
        return "\n".join(sorted({*self.consoles, *now}))

    @property
    def iteration(self) -> int:
        """The newest complete iteration."""
        return max((event["iteration"] for event in self.events.of("iteration")), default=0)

    @property
    def size(self) -> int:
        """Number of workers in the last start of training; 0 before the first."""
        return next((event["world_size"] for event in reversed(self.events.of("start"))), 0)

    def ended(self) -> dict[int, int | None]:
        """Returns the exit code of the launcher of each present node; None if it has not ended."""
        return {node: self.jobs[node].process.poll() for node in sorted(self.present)}

    def left(self) -> list[str]:
        """Returns leftover processes and temporary files of the job, one sentence each; kills the processes."""
        mine = str(self._files)
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if process.pid != os.getpid() and f"{mine}/" in " ".join(process.info["cmdline"] or ()):
                found.append(f"process {process.pid} is left")
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        return found + [f"{path} is left" for path in self._files.glob("tmp*/mocrun-*")]
