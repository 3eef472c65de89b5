"""Runs a job of our launcher on the hosts of a cluster, to inject faults and to observe it during training."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.cluster.hosts import Cluster, Host
from benchmarks.cluster.judge import Life, Publication
from benchmarks.live.job import ROOT, WORKER, Events
from moc.runtime.child_processes import is_dying

PORT = 29400
_SAMPLE_S = 0.05


class ClusterJob:
    """One job; ``events`` are its own events, and ``watch`` is the observation from outside.

    Args:
        cluster: hosts of the job; the first ones have rank blocks, the others are spares.
        launcher: flags of the launcher, except the node's number.
        program: flags of the training program.
        directory: directory for logs and consoles that all hosts share.
        snapshots: directory of the job's snapshots.
    """

    def __init__(
        self, cluster: Cluster, launcher: Sequence[object], program: Sequence[object], directory: Path, snapshots: Path
    ):
        self.cluster, self.events = cluster, Events(directory / "events.jsonl")
        command = [*launcher, ROOT / "pretrain_gpt_moe.py", *program, "--log-dir", directory, "--ckpt-dir", snapshots]
        self._command, self._directory = list(map(str, command)), directory
        self._token = secrets.token_hex(32)
        self._launchers: dict[int, subprocess.Popen] = {}
        self.watch = Watch(cluster, directory, snapshots)

    def start(self, number: int) -> None:
        """Starts the launcher of a host."""
        ours = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "MOC_TOKEN": self._token}
        temporary = self._directory / f"tmp{number}"
        temporary.mkdir(exist_ok=True)
        with open(console_of(self._directory, number), "a") as console:
            self._launchers[number] = self.cluster.hosts[number].start(
                [sys.executable, "-W", "ignore", "-m", "moc.launch", "--node-rank", number, *self._command],
                env=os.environ | ours | {"TMPDIR": str(temporary)},
                cwd=self._directory,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def codes(self) -> dict[int, int | None]:
        """Returns the exit code of the launcher of each host that is on; None while it runs."""
        return {i: one.poll() for i, one in self._launchers.items() if self.cluster.hosts[i].on}

    def iteration(self) -> int:
        """Returns the newest iteration in the events."""
        return max((event["iteration"] for event in self.events.of("iteration")), default=0)

    def controllers(self) -> list[tuple[Host, psutil.Process]]:
        """Returns the processes of controllers, with their hosts."""
        found = []
        for host in self.cluster.hosts:
            for process in host.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "moc.runtime.controller" in process.cmdline():
                        found.append((host, process))
        return found

    def newest_worker_of(self, number: int) -> psutil.Process:
        """Returns the last worker that a host's launcher has reported."""
        worker = self.cluster.hosts[number].process(int(WORKER.findall(self.said(number))[-1][1]))
        assert worker is not None  # the launcher has reported it
        return worker

    def launcher_of(self, number: int) -> list[psutil.Process]:
        """Returns the launcher of a host, and the ``nsenter`` process that is its parent."""
        outside = psutil.Process(self._launchers[number].pid)
        return [*outside.children(), outside]

    def signal_launcher(self, number: int, what: signal.Signals) -> None:
        """Sends a signal only to a launcher; the other processes of its host continue."""
        for process in self.launcher_of(number) if what != signal.SIGSTOP else self.launcher_of(number)[:1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(what)

    def traceback(self, number: int) -> bool:
        """Returns whether a process of a host has printed a traceback, the sign of an unhandled error."""
        return "Traceback (most recent call last)" in self.said(number)

    def said(self, number: int) -> str:
        """Returns the console output of a host's launcher and workers."""
        with contextlib.suppress(FileNotFoundError):
            return console_of(self._directory, number).read_text(errors="replace")
        return ""


def console_of(directory: Path, number: int) -> Path:
    """Returns the path of a host's console output."""
    return directory / f"console{number}"


class Watch:
    """Thread that observes a job from outside: lifetimes of workers, and times of published snapshots."""

    def __init__(self, cluster: Cluster, directory: Path, snapshots: Path):
        self._cluster, self._directory, self._snapshots = cluster, directory, snapshots
        self._read = dict.fromkeys(range(len(cluster.hosts)), 0)
        self._lives: dict[tuple[int, int, psutil.Process], tuple[float, float]] = {}
        self._manifests: dict[Path, tuple[int, int]] = {}
        self.publications: list[Publication] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        self._thread.join()

    @property
    def lives(self) -> list[Life]:
        """Lifetimes of all observed workers."""
        return [Life(rank, host, *seen) for (rank, host, _), seen in self._lives.items()]

    def _run(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            for host in self._cluster.hosts:
                self._find_workers(host)
            now = time.time()
            for key, (begin, _) in list(self._lives.items()):
                if _acts(key[2]):
                    self._lives[key] = begin, now
            self._find_manifests()

    def _find_workers(self, host: Host) -> None:
        path = console_of(self._directory, host.number)
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as console:
            console.seek(self._read[host.number])
            new = console.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read[host.number] += len(whole)
            for rank, number in WORKER.findall(whole.decode(errors="replace")):
                with contextlib.suppress(AttributeError):  # the host has just been powered off
                    if (process := host.process(int(number))) is not None:
                        self._lives[int(rank), host.number, process] = time.time(), time.time()

    def _find_manifests(self) -> None:
        for path in self._snapshots.glob("iter_*/manifest.json"):
            with contextlib.suppress(OSError, ValueError):
                status = path.stat()
                version = status.st_ino, status.st_mtime_ns
                if self._manifests.get(path) != version:
                    self._manifests[path] = version
                    told = json.loads(path.read_bytes())
                    generation = told.get("generation", told.get("state", {}).get("generation"))
                    self.publications.append(Publication(status.st_mtime, told["iteration"], generation))


def _acts(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        still = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED) or is_dying(process.pid)
        return process.is_running() and not still
    return False
