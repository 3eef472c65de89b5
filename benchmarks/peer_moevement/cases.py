"""The model, the layout and the jobs that are compared."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.live.job import PROGRAM, Job, launcher

HERE = Path(__file__).resolve().parent
WORKERS = 4
SHAPE = dict(layers=4, hidden=128, heads=4, feed_forward=256, experts=4, sequence=64, vocabulary=256)
SHAPE |= dict(stages=2, micro_batch=4, micro_batches=4, lr=1e-2, weight_decay=0.01, clip=0.1)
"""What both train: 1.4 M parameters, with experts in each of 4 layers, in 2 pipeline stages of 2 data-parallel ranks.
Gradient norms are above ``clip`` throughout."""
LOSS_SCALE = 1024
"""Of fp16; static, so that both skip no update."""

PUBLIC_PRECISION = {
    "bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": LOSS_SCALE}},
    "fp32": {},
}
"""How DeepSpeed is told.  If bf16 gradients are to be summed in fp32 it takes another optimizer than ZeRO-1's."""

_FIXED = """--moe-router-topk 1 --moe-router-pre-softmax --moe-router-load-balancing-type none --moe-aux-loss-coeff 0
    --moe-token-dispatcher-type alltoall --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer --lr-decay-style constant
    --adam-beta2 0.999 --transformer-impl local --mock-data --tokenizer-type NullTokenizer --eval-iters 0
    --num-workers 0 --log-interval 1""".split()
SAVING = "--ckpt-policy sparse --ckpt-tier disk --upstream-logging --sparse-window"
"""How ours saves, by default; the window follows."""


@dataclass(frozen=True)
class Case:
    """One job.

    Attributes:
        anywhere: kill in the middle of an iteration, as ours always; by default all workers of a public job have come
            to the end of one and wait, as in its own examples.
        repaired: all workers of a public job describe what they send anew when they have recovered.  Without that the
            new worker does so alone; its neighbour takes the description for the first activation, each tensor for
            the one before, and both wait forever.
    """

    system: str  # ``ours`` or ``public``
    window: int  # iterations of a window; 0 for no snapshots
    victim: int | None = None  # the worker that is killed, after the iteration ``kill_at``; None for no fault
    anywhere: bool = False
    repaired: bool = True

    @property
    def name(self) -> str:
        saving = f"W={self.window}" if self.window else "no snapshots"
        lost = "" if self.victim is None else f", worker {self.victim} killed"
        return f"{self.system}, {saving}{lost}"


@dataclass(frozen=True)
class Plan:
    """What all jobs have in common."""

    checkout: Path  # of the public implementation
    python: str  # an interpreter that has what it needs
    precision: str = "bf16"  # ``bf16``, ``fp16`` or ``fp32``
    saving: str = SAVING  # flags by which ours saves; the window follows
    iterations: int = 40  # of each job
    kill_at: int = 22  # see :class:`Case`
    takes_turns: bool = False  # with other jobs, so that our launcher must bear to hear nothing of its workers


def start(case: Case, plan: Plan, directory: Path) -> Job:
    """Starts a job, whose files are in an empty directory."""
    if case.system == "public":
        (directory / "end").mkdir()
        command = ["--workers", WORKERS, "--checkout", plan.checkout, *public_flags(case, plan, directory)]
        around = {"PYTHONPATH": str(plan.checkout), "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(WORKERS)}
        around["TORCHDYNAMO_DISABLE"] = "1"  # else a replacement compiles before it computes
        return Job([HERE / "supervise.py", *command], directory, environment=around, python=plan.python)
    command = [*launcher(WORKERS), *(["--silence-timeout", 600] if plan.takes_turns else []), PROGRAM]
    return Job([*command, *our_flags(case, plan)], directory, saves=case.window > 0)


def our_flags(case: Case, plan: Plan) -> list[str]:
    """Flags of ``pretrain_gpt_moe.py``."""
    s = SHAPE
    sizes = {
        "num-layers": s["layers"],
        "hidden-size": s["hidden"],
        "num-attention-heads": s["heads"],
        "ffn-hidden-size": s["feed_forward"],
        "num-experts": s["experts"],
        "seq-length": s["sequence"],
        "max-position-embeddings": s["sequence"],
        "vocab-size": s["vocabulary"] - 1,  # and the end of a document
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
    """Flags of ``worker.py``."""
    flags = ["--shape", json.dumps(SHAPE), "--precision", json.dumps(PUBLIC_PRECISION[plan.precision])]
    flags += ["--iterations", plan.iterations, "--window", case.window, "--end", directory / "end"]
    if case.victim is not None:
        flags += ["--victim", case.victim]
        flags += [] if case.anywhere else ["--stop-at", plan.kill_at]
        flags += ["--repair"] if case.repaired else []
    return [str(flag) for flag in flags]
