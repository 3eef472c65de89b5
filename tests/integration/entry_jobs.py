"""Jobs of Megatron-LM's scripts under ``mocrun``, and of the same scripts with Megatron-LM's own loop."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.live.job import free_ports
from tests import warm
from tests.worlds import REPOSITORY

USER_SCRIPT = REPOSITORY / "tests/integration/user_pretrain.py"
OWN_PROGRAM = REPOSITORY / "pretrain_gpt_moe.py"
SCRIPTS = Path(os.environ.get("MOC_MEGATRON_LM") or REPOSITORY / "nothing")
"""The directory of Megatron-LM's root scripts, which the wheel of megatron-core does not contain."""
needs_scripts = pytest.mark.skipif(
    not (SCRIPTS / "pretrain_gpt.py").is_file(),
    reason="MOC_MEGATRON_LM names no directory with Megatron-LM's scripts",
)

BASE = """
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 4 --global-batch-size 8 --train-iters 8 --lr 1e-3 --min-lr 1e-4
    --lr-decay-style cosine --lr-warmup-iters 2 --lr-decay-iters 8 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 256 --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm
    --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-bias-gelu-fusion --no-rope-fusion
    --attention-backend unfused --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear
    --num-workers 0 --log-interval 1 --eval-interval 4 --eval-iters 1 --attention-dropout 0 --hidden-dropout 0
    --untie-embeddings-and-output-weights
"""
MOE = """
    --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type aux_loss
    --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 64
"""
EP2, ZERO1 = f"{MOE} --expert-model-parallel-size 2", "--use-distributed-optimizer"
FULL = "--ckpt-policy full --snapshot-interval 1"


@dataclass(frozen=True)
class Ended:
    """A job that has ended.

    Attributes:
        code: of the launcher.
        output: of all its processes.
        events: of ``events.jsonl``, in order.
    """

    code: int
    output: str
    events: list[dict]

    @property
    def losses(self) -> dict[int, tuple[float, float]]:
        """Loss and gradient norm of each iteration."""
        return {e["iteration"]: (e["loss"], e["grad_norm"]) for e in self.events if e["type"] == "iteration"}

    def of(self, kind: str) -> list[dict]:
        """The events of a kind."""
        return [event for event in self.events if event["type"] == kind]

    def resumed_at(self) -> list[int]:
        """The iterations that the job has resumed from."""
        return [event["iteration"] for event in self.of("resume")]

    def lost_snapshots(self) -> list[int]:
        """The iterations of resumptions from nothing, or from something older than the newest published snapshot."""
        newest, lost = 0, []
        for event in self.events:
            if event["type"] == "snapshot":
                newest = event["iteration"]
            elif event["type"] == "resume" and not event["iteration"] >= newest > 0:
                lost.append(event["iteration"])
        return lost


def run(
    directory: Path,
    script: Path,
    size: int,
    flags: str,
    *more: str,
    launcher: str = "",
    log: str = "log",
    base: str = BASE,
    cold: bool = False,
) -> Ended:
    """Runs a script under ``mocrun``; words with spaces are in ``more``.

    A ``cold`` job is started as a user starts it, by new Python processes; forks of the warm one cost less.
    """
    command = [sys.executable, "-m", "moc.launch", "--nproc-per-node", str(size), *launcher.split(), str(script)]
    words = [*base.split(), *flags.split(), "--log-dir", str(directory / log), *more]
    with contextlib.nullcontext() if cold else warm.starts():
        code, output = _output_of([*command, *words], directory)
    file = directory / log / "events.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return Ended(code, output, [json.loads(line) for line in lines])


def run_stock_loop(
    directory: Path, script: Path, size: int, flags: str, *more: str, base: str = BASE
) -> tuple[int, str]:
    """Runs a script with Megatron-LM's own loop, under torchrun; returns exit code and output."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    port = ["--master-port", str(*free_ports(1))]
    program = [str(REPOSITORY / "benchmarks/stock_loop.py"), str(script), *base.split(), *flags.split(), *more]
    program += ["--distributed-backend", "gloo"]
    with warm.starts():
        return _output_of([*launcher, *port, *program], directory)


def logged(output: str) -> list[tuple[int, dict[str, float]]]:
    """The values that Megatron-LM has logged, in order, with their iterations and without times.

    The maximum of ``user_pretrain.py`` is left out: Megatron-LM's loop prints the last worker's, and ours a mean.
    """
    lines = re.findall(r" iteration +(\d+)/ +\d+ \|(.*)\|", output)
    fields = [(int(number), dict(field.split(":") for field in values.split("|"))) for number, values in lines]
    left_out = "elapsed time per iteration (ms)", "user maximum"
    return [
        (number, {name.strip(): float(value) for name, value in values.items() if name.strip() not in left_out})
        for number, values in fields
    ]


def _output_of(command: list[str], directory: Path) -> tuple[int, str]:
    directory.mkdir(parents=True, exist_ok=True)
    ours = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}
    environment = os.environ | ours | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryFile("w+") as output:
        how = dict(stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        code = subprocess.run(command, cwd=directory, env=environment, **how).returncode
        output.seek(0)
        return code, output.read()
