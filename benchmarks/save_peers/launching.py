"""Runs groups of workers, each in its own directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.live.job import PROGRAM, ROOT
from benchmarks.save_peers.cases import WORKERS
from moc.files.event_log import read_events

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
OUTPUT = "output"  # file with the output of the workers
TIMEOUT = 600  # seconds for one group of workers
_TAIL = 4000  # characters of output in an error message


class RunFailed(RuntimeError):
    """A group of workers failed."""


@contextmanager
def directory_in(scratch: str) -> Iterator[Path]:
    """Provides a temporary directory whose blocks are freed on disk, not only unlinked, before the next run starts."""
    path = Path(tempfile.mkdtemp(dir=scratch))
    try:
        yield path
    finally:
        shutil.rmtree(path)
        os.sync()


def train(flags: list[str], directory: Path, log: Path) -> list[dict]:
    """Runs the users' program; returns its events."""
    launch([sys.executable, *TORCHRUN, PROGRAM, *flags], directory)
    return read_events(log)


def launch(command: list[str], directory: Path) -> None:
    """Runs a group of workers to its end; raises :class:`RunFailed` with the end of their output."""
    # One thread per worker, as in the trainer; DeepSpeed reads DS_ACCELERATOR and TORCH_EXTENSIONS_DIR.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    environment |= {"TORCH_EXTENSIONS_DIR": str(directory / "extensions")}
    with open(directory / OUTPUT, "w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(TIMEOUT)
        except BaseException as error:
            process.terminate()  # torchrun ends its workers
            process.wait(60)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = f"none after {TIMEOUT} s"
        if code != 0:
            output.seek(0)
            raise RunFailed(f"exit code {code}\n{' '.join(command)}\n{output.read()[-_TAIL:]}")
