"""Jobs under our own launcher, and faults that hit them.

They run ``held_pretrain_gpt_moe.py``: the program, which does not end before :meth:`Launched.wait` is called.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml

from benchmarks.live.job import Events, free_ports
from tests import warm
from tests.integration.tiny import FLAGS, LAYOUTS
from tests.worlds import REPOSITORY

PATIENCE_S = 500.0
"""Less than pytest's own limit, which ends a test without the console of its job."""
PROGRAM = "tests/integration/held_pretrain_gpt_moe.py"


class Launched:
    """A job that was started with ``python -m moc.launch``; to be used as a context, so that nothing of it is left.

    Args:
        layout: one of tiny's.
        flags: of the program, in addition to the tiny model's.
        directory: for all that it writes.
        own: flags of the launcher.
        nodes: launchers to start, one for each node.
        least: minimum number of nodes to continue.
        spares: launchers beyond these.
        candidates: nodes that may have the controller.
        launcher: module of the launcher.
        program: of the workers, in the repository.
        cold: as a user starts it, by new Python processes; forks of the warm one cost a tenth (:mod:`tests.warm`).
    """

    def __init__(
        self,
        layout: str,
        flags: dict,
        directory: Path,
        *own: str,
        nodes: int = 1,
        least: int = 0,
        spares: int = 0,
        candidates: int = 1,
        launcher: str = "moc.launch",
        program: str = PROGRAM,
        cold: bool = False,
    ):
        size, parallel = LAYOUTS[layout]
        directory.mkdir(parents=True, exist_ok=True)
        self.log, self._directory, self._may_end = directory / "log", directory, directory / "may end"
        self._flags = FLAGS | parallel | flags
        self._flags |= dict(log_dir=str(self.log))
        per_node = str(size // nodes)
        self._command = [sys.executable, "-W", "ignore", "-m", launcher, "--nproc-per-node", per_node, *own]
        if nodes > 1:
            numbers = ["--nnodes", f"{least}:{nodes}" if least else str(nodes)]
            numbers += ["--spares", str(spares)] if spares else []
            addresses = [f"127.0.0.1:{port}" for port in free_ports(candidates)]
            self._command += [*numbers, "--rdzv-endpoint", ",".join(addresses)]
        self._program = [str(REPOSITORY / program)]
        (directory / "flags.yaml").write_text(yaml.safe_dump(self._flags))
        self._token, self.launchers, self._lost = secrets.token_hex(32), [], set()
        self._start, self._events = contextlib.nullcontext if cold else warm.starts, Events(self.log / "events.jsonl")
        for node in range(nodes + spares):
            self.start(node)

    def start(self, node: int) -> None:
        """Starts the launcher of a node, the first time or again."""
        command = [*self._command, "--node-rank", str(node), *self._program]
        ours = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}
        environment = os.environ | ours | {"MOC_TOKEN": self._token, "TEST_MAY_END": str(self._may_end)}
        with open(self._directory / "console", "a") as console, self._start():
            process = subprocess.Popen(
                [*command, "--config", str(self._directory / "flags.yaml")],
                cwd=self._directory,
                env=environment,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.launchers[node : node + 1] = [process]
        self._lost.discard(node)

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_) -> None:
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()

    @property
    def process(self) -> subprocess.Popen:
        """The launcher of the first node that was not lost."""
        return self.launchers[next(node for node in range(len(self.launchers)) if node not in self._lost)]

    def children(self, module: str, node: int = 0) -> list[int]:
        """Processes that a node's launcher has started to run a module."""
        running = []
        for child in psutil.Process(self.launchers[node].pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # also a zombie's
                running += [child.pid] * (module in " ".join(child.cmdline()))
        return running

    def starts(self, module: str, node: int = 0, seconds: float = PATIENCE_S) -> None:
        """Waits until a node's launcher has started a process that runs a module."""
        deadline = time.monotonic() + seconds
        while not self.children(module, node):
            assert self.launchers[node].poll() is None, f"ended early:\n{self.console[-4000:]}"
            assert time.monotonic() < deadline, f"{module} is not there:\n{self.console[-4000:]}"
            time.sleep(0.01)

    def processes(self) -> list[int]:
        """All that there are of this job."""
        mine = str(self._directory)
        return [p.pid for p in psutil.process_iter(["cmdline"]) if mine in " ".join(p.info["cmdline"] or ())]

    def left(self, seconds: float = 30) -> list[tuple[int, str]]:
        """The processes of this job that do not end; launchers of other nodes may end a little after the first."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [(pid, " ".join(psutil.Process(pid).cmdline())) for pid in left if psutil.pid_exists(pid)]

    @property
    def console(self) -> str:
        """Output of all processes."""
        return (self._directory / "console").read_text()

    @property
    def pids(self) -> dict[int, int]:
        """By rank, the newest process."""
        found = re.findall(r"worker (\d+) is process (\d+)", self.console)
        return {int(rank): int(pid) for rank, pid in found}

    def events(self, kind: str) -> list[dict]:
        """The events of a kind, in order."""
        return self._events.of(kind)

    @property
    def iteration(self) -> int:
        """The newest that is complete."""
        return max((event["iteration"] for event in self.events("iteration")), default=0)

    def reach(self, iteration: int, seconds: float = PATIENCE_S) -> None:
        """Waits until an iteration is complete."""
        deadline = time.monotonic() + seconds
        while self.iteration < iteration:
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.console[-4000:]}"
            assert time.monotonic() < deadline, f"at iteration {self.iteration}:\n{self.console[-4000:]}"
            time.sleep(0.01)

    def tells(self, sentence: str, seconds: float = PATIENCE_S) -> None:
        """Waits for a text on the console."""
        deadline = time.monotonic() + seconds
        while sentence not in self.console:
            assert time.monotonic() < deadline, f"{sentence!r} is not in:\n{self.console[-4000:]}"
            time.sleep(0.05)

    def kill(self, *ranks: int, number: int = signal.SIGKILL) -> None:
        """Sends all workers a signal simultaneously."""
        for pid in [self.pids[rank] for rank in ranks]:
            os.kill(pid, number)

    def replaces(self, before: dict[int, int], *ranks: int, seconds: float = PATIENCE_S) -> None:
        """Waits until other processes than before have the places of workers."""
        deadline = time.monotonic() + seconds
        while any(self.pids[rank] == before[rank] for rank in ranks):
            assert time.monotonic() < deadline, self.console[-4000:]
            time.sleep(0.01)

    def lose(self, node: int) -> None:
        """Kills all processes of a node, as when its machine is lost."""
        launcher = psutil.Process(self.launchers[node].pid)
        for process in [launcher, *launcher.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.launchers[node].wait()
        self.is_lost(node)

    def is_lost(self, node: int) -> None:
        """Expects that a node is lost, or is about to be."""
        self._lost.add(node)

    def go_on(self, iteration: int) -> None:
        """Lets the first worker continue in an iteration that ``TEST_WAITS_IN`` names."""
        (self._directory / f"may go on in {iteration}").touch()

    def wait(self, seconds: float = PATIENCE_S) -> int:
        """The exit code, when it has ended; from now on it may."""
        self._may_end.touch()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end:\n{self.console[-4000:]}") from None

    def states(self) -> list[dict[str, str]]:
        """Final states that ``losing_pretrain_gpt_moe.py`` wrote on each worker."""
        return [json.loads(path.read_text()) for path in sorted(self._directory.glob("state of *.json"))]

    def begun(self) -> dict[int, list[int]]:
        """By process of a worker, the iterations that it has begun, in order."""
        files = self._directory.glob("begun by *")
        return {int(path.name.split()[-1]): [*map(int, path.read_text().split())] for path in files}

    def is_in(self, iteration: int, workers: int, seconds: float = PATIENCE_S) -> None:
        """Waits until so many workers have begun an iteration."""
        deadline = time.monotonic() + seconds
        while sum(iteration in begun for begun in self.begun().values()) < workers:
            assert time.monotonic() < deadline, f"iteration {iteration} has not begun:\n{self.console[-4000:]}"
            time.sleep(0.05)

    def records(self) -> list[tuple]:
        """Iteration, loss and gradient norm, as they were computed last."""
        found = {event["iteration"]: (event["loss"], event["grad_norm"]) for event in self.events("iteration")}
        return [(iteration, *values) for iteration, values in sorted(found.items())]
