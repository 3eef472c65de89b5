"""Jobs under our own launcher, as a user starts them, and what happens to them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

from moc.store.places import LocalPlace
from moc.store.store import Store
from tests.integration.snapshot_files import contents
from tests.integration.tiny import FLAGS, LAYOUTS
from tests.worlds import REPOSITORY


class Launched:
    """A job that was started with ``python -m moc.launch``.

    Args:
        layout: one of tiny's.
        flags: of the program, beside the tiny model's.
        directory: for all that it writes.
        own: flags of the launcher.
    """

    def __init__(self, layout: str, flags: dict, directory: Path, *own: str):
        size, parallel = LAYOUTS[layout]
        directory.mkdir(parents=True, exist_ok=True)
        self.log, self._console = directory / "log", directory / "console"
        self._flags = FLAGS | parallel | flags | dict(log_dir=str(self.log))
        command = [sys.executable, "-W", "ignore", "-m", "moc.launch", "--nproc-per-node", str(size), *own]
        (directory / "flags.yaml").write_text(yaml.safe_dump(self._flags))
        command += [str(REPOSITORY / "pretrain_gpt_moe.py"), "--config", str(directory / "flags.yaml")]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}
        with open(self._console, "w") as console:
            self.process = subprocess.Popen(
                command, cwd=directory, env=environment, stdout=console, stderr=subprocess.STDOUT
            )

    @property
    def console(self) -> str:
        """What all processes wrote."""
        return self._console.read_text()

    @property
    def pids(self) -> dict[int, int]:
        """By rank, the newest process."""
        found = re.findall(r"worker (\d+) is process (\d+)", self.console)
        return {int(rank): int(pid) for rank, pid in found}

    def events(self, kind: str) -> list[dict]:
        """The events of a kind, in order."""
        path = self.log / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(_loads, lines) if event.get("type") == kind]

    @property
    def iteration(self) -> int:
        """The newest that is complete."""
        return max((event["iteration"] for event in self.events("iteration")), default=0)

    def reach(self, iteration: int, seconds: float = 120) -> None:
        """Waits until an iteration is complete."""
        deadline = time.monotonic() + seconds
        while self.iteration < iteration:
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.console[-4000:]}"
            assert time.monotonic() < deadline, f"at iteration {self.iteration}:\n{self.console[-4000:]}"
            time.sleep(0.01)

    def kill(self, *ranks: int, number: int = signal.SIGKILL) -> None:
        """Sends workers a signal, all at once."""
        for pid in [self.pids[rank] for rank in ranks]:
            os.kill(pid, number)

    def wait(self, seconds: float = 120) -> int:
        """The exit code, when it has ended."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"did not end:\n{self.console[-4000:]}") from None

    def end_state(self) -> tuple[list, dict]:
        """Loss and gradient norm of each iteration, as they were computed last, and the hashes of the last snapshot."""
        records = {event["iteration"]: (event["loss"], event["grad_norm"]) for event in self.events("iteration")}
        store = Store(LocalPlace(self._flags["ckpt_dir"]))
        return sorted(records.items()), contents(store, max(store.iterations()))


def _loads(line: str) -> dict:
    try:
        return json.loads(line)
    except json.JSONDecodeError:  # the line that a killed worker was writing
        return {}
