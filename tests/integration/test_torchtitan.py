"""torchtitan's Trainer survives the loss of workers (moc.torchtitan)."""

import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest

from tests.errors import raises
from tests.integration.test_pure_torch import running, starter
from tests.shared import ALL
from tests.worlds import REPOSITORY

pytest.importorskip("torchtitan", reason="torchtitan is not installed: pip install -e .[torchtitan]")

from moc.torchtitan import FaultTolerantTrainer  # noqa: E402
from tests.integration import torchtitan_loop  # noqa: E402

ITERATIONS = 24


@pytest.fixture(autouse=True)
def data(tmp_path):
    torchtitan_loop.write_data(tmp_path / "data")


def states(directory):
    return [(directory / f"weights{rank}").read_text() for rank in (0, 1)]


def train(directory, kind, kills=(), options=(), iterations=ITERATIONS):
    """Trains with two workers, kills ``(ranks, iteration)``, and returns states and console."""
    directory.mkdir(exist_ok=True)
    program = starter(directory, "torchtitan_loop", kind)
    started = dict(starts=nullcontext, program=program, options=options)  # with torch's settings as of torchtitan's
    with running(directory / "run", iterations=iterations, **started) as run:
        for generation, (ranks, iteration) in enumerate(kills, 1):
            run.reach(iteration)
            for rank in ranks:
                run.kill(rank)
            run.generation(generation)
        run.end()
        return states(directory / "run"), run.console


def train_by_torchtitan(directory, kind):
    """Trains with torchtitan's own trainer, and returns the states of both workers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    directory.mkdir()
    command = [sys.executable, "-m", "tests.integration.torchtitan_loop", kind, "--stock", "--comm.trace_buf_size=0"]
    command += ["--ckpt-dir", str(directory / "snapshots"), "--iterations", str(ITERATIONS)]
    common = os.environ | {
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    workers = [
        subprocess.Popen(command, cwd=REPOSITORY, env=common | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01"
    ]
    assert [worker.wait() for worker in workers] == [0, 0]
    return states(directory)


@pytest.mark.recovery
@pytest.mark.parametrize("kind", torchtitan_loop.KINDS if ALL else ["fsdp", "experts"])
def test_killed_trainer_ends_with_state_of_torchtitans(kind, tmp_path):
    """One worker is killed, then both."""
    killed, console = train(tmp_path, kind, [([1], 5), ([0, 1], 12)])
    assert killed == train_by_torchtitan(tmp_path / "torchtitan", kind), console


@pytest.mark.recovery
def test_initial_weights_are_loaded_before_first_step(tmp_path):
    """A worker is killed soon; the loaded weights are those of the checkpoint, whose next steps are torchtitan's."""
    train(tmp_path, "checkpoint", iterations=4)
    (tmp_path / "run").rename(tmp_path / "first")
    checkpoint = f"--checkpoint.initial_load_path={tmp_path / 'first' / 'checkpoint' / 'step-4'}"
    undisturbed, _ = train(tmp_path, "checkpoint", options=[checkpoint])
    (tmp_path / "run").rename(tmp_path / "undisturbed")
    killed, console = train(tmp_path, "checkpoint", [([0], 2)], options=[checkpoint])
    (tmp_path / "run").rename(tmp_path / "killed")
    assert killed == undisturbed, console
    assert killed != train(tmp_path, "fsdp")[0]


REFUSED = {
    "pipeline": lambda config: config.parallelism.__setattr__("pipeline_parallel_degree", 2),
    "graphs": lambda config: config.training.__setattr__("disable_cuda_graphs", False),
    "moments": lambda config: config.optimizer.__setattr__("implementation", "fused_opt_states_bf16"),
    "load": lambda config: config.checkpoint.__setattr__("load_step", 7),
    "async": lambda config: config.checkpoint.__setattr__("async_mode", "async"),
}


@pytest.mark.parametrize("option", REFUSED)
def test_unsupported_option_is_refused_before_job_begins(option):
    config = replace(torchtitan_loop.tiny())
    REFUSED[option](config)
    with raises("loop-call-unsupported"):
        FaultTolerantTrainer(config)


def test_policy_that_counts_tokens_is_refused():
    with raises("loop-policy-unsupported"):
        FaultTolerantTrainer(torchtitan_loop.tiny(), {"policy": "pec"})
