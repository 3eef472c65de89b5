"""The program on one GPU under our launcher: its worker is killed, and another one goes on bit-identically."""

import json
import subprocess
import sys
import tempfile

from tests.gpu.one_gpu import MEMORY
from tests.gpu.test_train import FLAGS, ROOT, ZERO

ITERATIONS = 20


def train(directory, *flags):
    command = [sys.executable, "-m", "moc.launch", "--nproc-per-node", "1", str(ROOT / "pretrain_gpt_moe.py")]
    command += [*FLAGS, *ZERO]
    places = ["--log-dir", directory / "log", "--ckpt-dir", directory / "snapshots"]
    command += map(str, [*places, "--ckpt-policy", "full", "--ckpt-tier", "memory", *flags])
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    events = map(json.loads, (directory / "log" / "events.jsonl").read_text().splitlines())
    return [event for event in events if event["type"] in ("iteration", "resume")]


def records(events):
    return {e["iteration"]: (e["loss"], e["grad_norm"]) for e in events if e["type"] == "iteration"}


def test_killed_gpu_worker_is_replaced_bit_identically(tmp_path):
    """It is forked from a process that has imported everything, and has not touched CUDA."""
    faults = ["kill rank=0 iteration=8 point=forward_backward", "kill rank=0 iteration=14 point=after_commit"]
    with tempfile.TemporaryDirectory(dir=MEMORY) as memory:
        places = ["--ckpt-memory-dir", memory, "--snapshot-interval"]
        whole = train(tmp_path / "whole", *places, ITERATIONS)
        disturbed = train(tmp_path / "disturbed", *places, 1, "--inject", *faults)
    assert records(disturbed) == records(whole) and len(records(whole)) == ITERATIONS
    assert [event["tier"] for event in disturbed if event["type"] == "resume"] == ["memory"] * len(faults)
