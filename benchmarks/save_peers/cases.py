"""Cases, models and layouts of the comparison of save methods."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.live.job import ZERO2


@dataclass(frozen=True)
class Case:
    """One save method."""

    label: str  # name in tables
    program: str  # module below ``benchmarks.save_peers``; ``ours`` is the training program itself
    mode: str  # mode of the module; flags for ours
    blocking: bool  # training waits until the checkpoint is complete
    engine: tuple[str, ...] = ()  # flags of our program for another engine
    keeps: str = "disk"  # final place of the checkpoint
    notes: str = ""  # notes for readers of the figures


OURS, DEEPSPEED = "ours", "deepspeed_engine"
FULL = "--ckpt-policy full --ckpt-tier"

CASES = {
    "ours-memory": Case("ours, memory", OURS, f"{FULL} memory", False, keeps="memory"),
    "ours-disk": Case("ours, disk", OURS, f"{FULL} disk", False),
    "ours-blocking": Case("ours, disk, blocking", OURS, f"{FULL} disk --ckpt-blocking", True),
    "zero2-memory": Case("ours, DeepSpeed's ZeRO-2, memory", OURS, f"{FULL} memory", False, ZERO2, keeps="memory"),
    "zero2-disk": Case("ours, DeepSpeed's ZeRO-2, disk", OURS, f"{FULL} disk", False, ZERO2),
    "zero2-blocking": Case(
        "ours, DeepSpeed's ZeRO-2, disk, blocking", OURS, f"{FULL} disk --ckpt-blocking", True, ZERO2
    ),
    "torch-sync": Case("torch DCP save", "torch_dcp", "sync", True),
    "torch-thread": Case("torch DCP async_save, thread", "torch_dcp", "thread", False),
    "torch-process": Case("torch DCP async_save, process", "torch_dcp", "process", False),
    "mcore-sync": Case("megatron-core dist_checkpointing", "mcore_dist", "sync", True),
    "mcore-async": Case(
        "megatron-core dist_checkpointing, async",
        "mcore_dist",
        "async",
        False,
        notes="Without a device nothing is staged: the forked writer reads the worker's pages, which the kernel copies "
        "when training changes them. So its stall is a fork here, and a copy from the device elsewhere.",
    ),
    "deepspeed-blocking": Case(
        "DeepSpeed save_checkpoint",
        DEEPSPEED,
        "blocking",
        True,
        notes="A model of its own with as many parameters; writes without fsync, so it ends in the page cache.",
    ),
    "deepspeed-fast": Case(
        "DeepSpeed save_checkpoint, fast engine",
        DEEPSPEED,
        "fast",
        True,
        notes="As the blocking one, but by DeepSpeed's FastCheckpointEngine, with its Python writer.",
    ),
    "deepspeed-decoupled": Case(
        "DeepSpeed save_checkpoint, decoupled",
        DEEPSPEED,
        "decoupled",
        False,
        notes="As the blocking one. Its Python writer; the one with asynchronous I/O compiles an extension. It shares "
        "memory with training, which therefore waits for it before the next update. Copies are not counted. It stands "
        "for asynchronous engines like DataStates', which DeepSpeed has a door for and no package index has.",
    ),
}

LAYOUTS = {
    "DP4xEP2": ["--expert-model-parallel-size", "2"],
    "PP2xEP2": ["--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "2"],
}
WORKERS = 4

COMMON = """--bf16 --moe-router-topk 1 --moe-router-pre-softmax --moe-token-dispatcher-type alltoall
    --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
    --tokenizer-type NullTokenizer --mock-data --use-distributed-optimizer
    --micro-batch-size 1 --global-batch-size 4 --lr 1e-4 --num-workers 0 --eval-iters 0 --log-interval 1""".split()

_FULL = """--num-layers 8 --hidden-size 512 --ffn-hidden-size 2048 --num-attention-heads 8 --num-experts 8
    --seq-length 64 --max-position-embeddings 64 --vocab-size 8191""".split()

_QUICK = """--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-experts 4
    --seq-length 32 --max-position-embeddings 32 --vocab-size 511""".split()


def model_flags(quick: bool) -> list[str]:
    """Returns the program's flags for a model of 151 M parameters, or 0.2 M if ``quick``."""
    return [*COMMON, *(_QUICK if quick else _FULL)]


def left_out(case: Case, layout: str, deepspeed_version: str | None) -> str | None:
    """Returns the reason why a case cannot run in a layout; None if it can."""
    if case.engine and not layout.startswith("DP"):
        return "ZeRO-2 has no pipeline"
    if case.program != DEEPSPEED:
        return None
    if deepspeed_version is None:
        return "deepspeed cannot be imported: name a Python that has it with --deepspeed-python"
    return None if layout.startswith("DP") else "DeepSpeed's pipeline module saves one worker's experts for all"
