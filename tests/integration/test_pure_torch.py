"""Somebody else's training loop survives what ours does, by moc alone (docs/how-to/own-engine.md)."""

import ast
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext, suppress

import pytest

from benchmarks.live.job import Events
from moc.inspect import memory
from moc.session.settings import Settings
from moc.store.errors import CheckpointError
from moc.store.storage import lease_remaining_s
from tests import warm
from tests.host_memory import find_memory_storage
from tests.worlds import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "pure_torch.py"
ITERATIONS = 240


class Run:
    """Two workers of the example under our launcher; started as a user does, or by :mod:`tests.warm`."""

    def __init__(self, directory, iterations, starts, program, flags=(), options=()):
        self._console, self._events = directory / "console", Events(directory / "log" / "events.jsonl")
        self._snapshots = directory / "snapshots"
        where = ["--ckpt-dir", self._snapshots, "--log-dir", directory / "log", "--iterations", iterations, *options]
        command = [sys.executable, "-W", "ignore", "-m", "moc.launch", "--nproc-per-node", "2", *flags, program, *where]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
        self._console.parent.mkdir(exist_ok=True)
        with open(self._console, "a") as console, starts():
            self.process = subprocess.Popen(
                list(map(str, command)),
                cwd=REPOSITORY,
                env=env,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def console(self):
        return self._console.read_text()

    def reach(self, iteration):
        """Waits until there is a snapshot of an iteration, or of one after it."""
        deadline = time.monotonic() + 120
        while max((event["iteration"] for event in self._events.of("snapshot")), default=0) < iteration:
            assert self.process.poll() is None and time.monotonic() < deadline, self.console
            time.sleep(0.01)

    def kill(self, rank):
        pid = re.findall(rf"worker {rank} is process (\d+)", self.console)[-1]
        os.kill(int(pid), 9)

    def generation(self, number):
        deadline = time.monotonic() + 120
        while not re.search(rf"^mocrun: generation {number}: ", self.console, re.MULTILINE):
            assert self.process.poll() is None and time.monotonic() < deadline, self.console
            time.sleep(0.01)

    def forget(self):
        """Ends it, and removes what it has left in memory."""
        self.process.kill()
        self.process.wait()
        with suppress(CheckpointError):  # no run has begun
            shutil.rmtree(find_memory_storage(Settings.memory_dir, str(self._snapshots)).root, ignore_errors=True)

    def end(self):
        """The last line that it says: iteration, loss and hash of the weights."""
        assert self.process.wait(timeout=240) == 0, self.console
        return self.console.splitlines()[-1]


@contextmanager
def running(directory, iterations=ITERATIONS, starts=warm.starts, program=EXAMPLE, flags=(), options=()):
    run = Run(directory, iterations, starts, program, flags, options)
    try:
        yield run
    finally:
        run.forget()


def starter(directory, module, kind):
    """Writes a program that calls main() of a module of tests.integration, with a kind as its first argument."""
    program = directory / f"{kind}.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); sys.argv.insert(1, {kind!r})\n"
        f"from tests.integration.{module} import main\nmain()\n"
    )
    return program


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    with running(tmp_path_factory.mktemp("undisturbed") / "run", starts=nullcontext) as run:
        return run.end()


@pytest.mark.recovery
def test_workers_killed_in_sequence_keep_bits(undisturbed, tmp_path):
    with running(tmp_path / "run") as run:
        for generation, (rank, iteration) in enumerate([(1, 10), (0, 30), (1, 50)], 1):
            run.reach(iteration)
            run.kill(rank)
            run.generation(generation)
        assert run.end() == undisturbed
        assert "1 worker keeps" in run.console


def test_finished_run_resumes_from_storage(undisturbed, tmp_path):
    with running(tmp_path / "run", iterations=ITERATIONS // 2) as run:
        assert f"iteration {ITERATIONS // 2}:" in run.end()
    shutil.rmtree(tmp_path / "run" / "log")
    with running(tmp_path / "run") as run:
        assert run.end() == undisturbed
        assert f"iter_{ITERATIONS // 2:07}" in run.console


def test_killed_job_keeps_memory_until_lease_expires(tmp_path, capsys):
    """The lease is the launcher's --silence-timeout; each iteration renews it."""
    with running(tmp_path / "run", flags=("--silence-timeout", "77")) as run:
        run.reach(10)
        left = find_memory_storage(Settings.memory_dir, str(tmp_path / "run" / "snapshots")).root
        os.utime(left / ".lease", (0, 0))
        run.reach(12)
        assert 60 < lease_remaining_s(left) <= 77
        run.process.kill()
        run.process.wait()
        remove = ["--remove", "--ckpt-dir", str(tmp_path / "run" / "snapshots")]
        deadline = time.monotonic() + 120
        while "used by" in clean(capsys, *remove):  # workers die with their launcher
            assert time.monotonic() < deadline
        assert left.exists()
        assert memory.main([*remove, "--ended"]) == 0 and not left.exists()


def clean(capsys, *words):
    """What the tool writes to standard error when it refuses to remove memory."""
    assert memory.main([*words]) == 1
    return capsys.readouterr().err


def test_example_is_short_and_imports_only_torch_and_moc():
    source = EXAMPLE.read_text()
    assert len(source.splitlines()) < 200
    imported = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]  # fmt: skip
    ours = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert ours == {"torch", "moc"}
