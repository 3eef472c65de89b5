"""Model, layout and jobs of the comparison."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.live.job import PROGRAM, Job, launcher

HERE = Path(__file__).resolve().parent
WORKERS = 4
SHAPE = dict(layers=4, hidden=128, heads=4, feed_forward=256, experts=4, sequence=64, vocabulary=256)
SHAPE |= dict(stages=2, micro_batch=4, micro_batches=4, lr=1e-2, weight_decay=0.01, clip=0.1)
"""Model and optimizer of both systems: 1.4 M parameters, with experts in each of 4 layers, in 2 stages of 2 DP ranks.

Gradient norms are above ``clip`` in all iterations.
"""
LOSS_SCALE = 1024
"""Loss scale of fp16; static, so both systems skip no update."""

PUBLIC_PRECISION = {
    "bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": LOSS_SCALE}},
    "fp32": {},
}
"""DeepSpeed's settings by precision. For bf16 gradients summed in fp32 it uses another optimizer than ZeRO-1's."""

_FIXED = """--moe-router-topk 1 --moe-router-pre-softmax --moe-router-load-balancing-type none --moe-aux-loss-coeff 0
    --moe-token-dispatcher-type alltoall --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer --lr-decay-style constant
    --adam-beta2 0.999 --transformer-impl local --mock-data --tokenizer-type NullTokenizer --eval-iters 0
    --num-workers 0 --log-interval 1""".split()
SAVING = "--ckpt-policy sparse --ckpt-tier disk --upstream-logging --sparse-window"
"""Default saving flags of our program; the window is appended."""


@dataclass(frozen=True)
class Case:
    """One job.

    Attributes:
        anywhere: kill in the middle of an iteration, as in all our jobs; by default all workers of a public job wait at
            the end of one, as in its own examples.
        repaired: all workers of a public job send their tensor descriptions again after a recovery. Otherwise only the
            new worker does; its neighbour takes the description for the first activation, each tensor for the previous
            one, and both wait forever.
    """

    system: str  # ``ours`` or ``public``
    window: int  # iterations of a window; 0: no snapshots
    victim: int | None = None  # worker killed after the iteration ``kill_at``; None: no fault
    anywhere: bool = False
    repaired: bool = True

    @property
    def name(self) -> str:
        saving = f"W={self.window}" if self.window else "no snapshots"
        lost = "" if self.victim is None else f", worker {self.victim} killed"
        return f"{self.system}, {saving}{lost}"


@dataclass(frozen=True)
class Plan:
    """Settings common to all jobs."""

    checkout: Path  # checkout of the public implementation
    python: str  # Python interpreter with its dependencies
    precision: str = "bf16"  # ``bf16``, ``fp16`` or ``fp32``
    saving: str = SAVING  # saving flags of our program; the window is appended
    iterations: int = 40  # iterations of each job
    kill_at: int = 22  # see :class:`Case`
    takes_turns: bool = False  # takes turns with other jobs, so our launcher must tolerate silent workers


def start(case: Case, plan: Plan, directory: Path) -> Job:
    """Starts a job in an empty directory."""
    if case.system == "public":
        (directory / "end").mkdir()
        command = ["--workers", WORKERS, "--checkout", plan.checkout, *public_flags(case, plan, directory)]
        around = {"PYTHONPATH": str(plan.checkout), "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(WORKERS)}
        around["TORCHDYNAMO_DISABLE"] = "1"  # otherwise a replacement compiles first
        return Job([HERE / "supervise.py", *command], directory, environment=around, python=plan.python)
    command = [*launcher(WORKERS), *(["--silence-timeout", 600] if plan.takes_turns else []), PROGRAM]
    return Job([*command, *our_flags(case, plan)], directory, saves=case.window > 0)


def our_flags(case: Case, plan: Plan) -> list[str]:
    """Returns the flags of ``pretrain_gpt_moe.py``."""
    s = SHAPE
    sizes = {
        "num-layers": s["layers"],
        "hidden-size": s["hidden"],
        "num-attention-heads": s["heads"],
        "ffn-hidden-size": s["feed_forward"],
        "num-experts": s["experts"],
        "seq-length": s["sequence"],
        "max-position-embeddings": s["sequence"],
        "vocab-size": s["vocabulary"] - 1,  # plus the end of a document
        "pipeline-model-parallel-size": s["stages"],
        "micro-batch-size": s["micro_batch"],
        "global-batch-size": s["micro_batch"] * s["micro_batches"] * WORKERS // s["stages"],
        "lr": s["lr"],
        "weight-decay": s["weight_decay"],
        "clip-grad": s["clip"],
        "train-iters": plan.iterations,
    }
    flags = [*_FIXED, *(word for name, value in sizes.items() for word in (f"--{name}", str(value)))]
    flags += {"fp16": ["--fp16", "--loss-scale", str(LOSS_SCALE)], "bf16": ["--bf16"], "fp32": []}[plan.precision]
    return flags + ([*plan.saving.split(), str(case.window)] if case.window else [])


def public_flags(case: Case, plan: Plan, directory: Path) -> list[str]:
    """Returns the flags of ``worker.py``."""
    flags = ["--shape", json.dumps(SHAPE), "--precision", json.dumps(PUBLIC_PRECISION[plan.precision])]
    flags += ["--iterations", plan.iterations, "--window", case.window, "--end", directory / "end"]
    if case.victim is not None:
        flags += ["--victim", case.victim]
        flags += [] if case.anywhere else ["--stop-at", plan.kill_at]
        flags += ["--repair"] if case.repaired else []
    return [str(flag) for flag in flags]
