"""Many NCCL ranks on one GPU: workers are killed at named points, and all is as without that, bit by bit."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.gpu.one_gpu import ASKED, MEMORY
from tests.gpu.test_train import ROOT

PROGRAM = ROOT / "tests" / "gpu" / "one_gpu_pretrain_gpt_moe.py"
FLAGS = """--num-layers 2 --hidden-size 128 --num-attention-heads 4 --num-experts 4 --moe-router-topk 2 --swiglu
    --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --seq-length 128
    --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall --untie-embeddings-and-output-weights
    --micro-batch-size 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --log-interval 5
    --deterministic-mode --transformer-impl local --use-distributed-optimizer --bf16 --num-workers 1
    --expert-model-parallel-size 2 --ckpt-tier memory""".split()

FULL = "--global-batch-size 4 --ckpt-policy full".split()
SPARSE = (
    "--pipeline-model-parallel-size 2 --global-batch-size 4 --ckpt-policy sparse --sparse-window 2 --upstream-logging"
).split()


class Job:
    """Jobs of one layout, which differ in their faults alone."""

    def __init__(self, directory: Path, workers: int, iterations: int, flags: Sequence[str]):
        self._directory, self._workers, self._iterations, self._flags = directory, workers, iterations, flags
        self._whole: dict | None = None

    def run(self, name: str, *flags: object, **environment: str) -> tuple[dict, list[dict]]:
        """Returns loss and gradient norm by iteration, and all events."""
        directory = self._directory / name
        command = [sys.executable, "-m", "moc.launch", "--nproc-per-node", self._workers, "--max-restarts", 100]
        command += [PROGRAM, *FLAGS, *self._flags, "--train-iters", self._iterations, *flags]
        command += ["--log-dir", directory / "log", "--ckpt-dir", directory / "snapshots"]
        ours = {ASKED: "1", "TEST_GPU_ONCE": str(directory / "once"), "OMP_NUM_THREADS": "1"}
        directory.mkdir(parents=True)
        with tempfile.TemporaryDirectory(dir=MEMORY) as memory:
            command += ["--ckpt-memory-dir", memory]
            done = subprocess.run(
                list(map(str, command)), cwd=ROOT, env=os.environ | ours | environment, capture_output=True, text=True
            )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
        events = [json.loads(line) for line in (directory / "log" / "events.jsonl").read_text().splitlines()]
        iterations = {e["iteration"]: (e["loss"], e["grad_norm"]) for e in events if e["type"] == "iteration"}
        assert len(iterations) == self._iterations
        return iterations, events

    def is_unharmed(self, name: str, losses: int, *flags: object, **environment: str) -> None:
        """Asserts that a run loses workers so often, and is as the one that loses none."""
        if self._whole is None:
            self._whole, _ = self.run("whole")
        found, events = self.run(name, *flags, **environment)
        assert found == self._whole
        assert sum(event["type"] == "generation" for event in events) >= losses


@pytest.fixture(scope="module")
def ep2(tmp_path_factory) -> Job:
    return Job(tmp_path_factory.mktemp("ep2"), 2, 10, FULL)


def test_kills_at_named_points_are_bit_identical(ep2):
    points = ("forward_backward", "after_reduce", "after_commit", "after_apply", "snapshot_copying")
    faults = [f"kill rank={i % 2} iteration={2 * i + 1} point={point}" for i, point in enumerate(points)]
    ep2.is_unharmed("points", len(faults), "--snapshot-interval", 1, "--inject", *faults)


def test_survivor_with_failed_device_is_replaced(ep2):
    """Its context is broken for good: that worker must go, too, and the job must not."""
    ep2.is_unharmed("assert", 1, "--snapshot-interval", 1, TEST_GPU_ASSERT="1 5")


def test_worker_with_over_half_of_gpu_memory_is_replaced(ep2):
    """Its reader processes must not keep the memory."""
    fault = "kill rank=1 iteration=5 point=forward_backward"
    ep2.is_unharmed("memory", 1, "--snapshot-interval", 1, "--inject", fault, TEST_GPU_HOLD="1 0.55")


def test_lost_stage_replays_from_logs(tmp_path):
    job = Job(tmp_path, 4, 8, SPARSE)
    faults = ["kill rank=2 iteration=4 point=forward_backward", "kill rank=1 iteration=6 point=after_commit"]
    job.is_unharmed("stages", len(faults), "--snapshot-interval", 1, "--inject", *faults)


def test_twenty_generations_are_bit_identical(tmp_path):
    job = Job(tmp_path, 2, 22, FULL)
    faults = [f"kill rank={i % 2} iteration={i + 1} point=forward_backward" for i in range(1, 21)]
    job.is_unharmed("twenty", len(faults), "--snapshot-interval", 1, "--inject", *faults)
