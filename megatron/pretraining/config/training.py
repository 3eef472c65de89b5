"""Flags of training length, batches, exits and random numbers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config.flag import REQUIRED, FlagGroup, flag


@dataclass(frozen=True)
class TrainingFlags(FlagGroup):
    """Training: batches, length, exits, activation recomputation."""

    micro_batch_size: int = flag(REQUIRED, "Samples in one forward pass of a model replica.", limits=">= 1")
    global_batch_size: int | None = flag(
        None,
        "Samples in one iteration, over all workers; by default --micro-batch-size times the data-parallel size.",
        limits=">= 1",
    )
    train_iters: int | None = flag(None, "Iterations to train, over all restarts.", limits=">= 1")
    train_samples: int | None = flag(None, "Samples to train, over all restarts.", limits=">= 1")
    skip_train: bool = flag(False, "Do not train: resume, save if --save is given, evaluate, and exit.")
    exit_interval: int | None = flag(
        None, "Save and exit at the next multiple of this many iterations; 0 for never.", limits=">= 0"
    )
    exit_duration_in_mins: int | None = flag(None, "Save and exit after this many minutes; 0 for never.", limits=">= 0")
    train_sync_interval: int | None = flag(
        None, "Iterations between synchronizations of host and device; 0 for none.", limits=">= 0"
    )
    check_weight_hash_across_dp_replicas_interval: int | None = flag(
        None, "Iterations between comparisons of the weights of data-parallel copies.", limits=">= 1"
    )
    exit_signal_handler: bool = flag(False, "Save and exit on --exit-signal, SIGTERM, SIGINT, SIGUSR1 or SIGHUP.")
    exit_signal: str = flag(
        "SIGTERM", "Signal of --exit-signal-handler.", choices=("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT")
    )
    recompute_activations: bool = flag(False, "Same as --recompute-granularity selective.")
    recompute_granularity: str | None = flag(
        None,
        "Recompute activations in the backward pass to save memory: whole layers (full) or attention only (selective).",
        choices=("full", "selective"),
    )
    recompute_method: str | None = flag(
        None,
        "Full recomputation: of all layers in equal groups (uniform), or of the first layers of each stage (block).",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = flag(
        None, "Layers in each recomputed group (uniform), or recomputed layers in a stage (block).", limits=">= 1"
    )
    calculate_per_token_loss: bool = flag(False, "Average the loss over tokens instead of micro batches.")
    check_for_nan_in_loss_and_grad: bool = flag(
        True, "Stop at a non-finite loss or gradient; off with the dynamic loss scaling of --fp16."
    )
    deterministic_mode: bool = flag(
        False,
        "Use only what is deterministic on CUDA, kernels and NCCL's algorithm, without torch.compile: slower, with "
        "bit-identical repeated runs, as CPUs always give (docs/reference/bit-identity.md).  Policies whose recovery "
        "is exact turn it on, unless --allow-nondeterministic is given.",
    )
    allow_nondeterministic: bool = flag(
        False,
        "Do not turn on --deterministic-mode on CUDA for policies whose recovery is exact; the run is then reported as "
        "not exact.",
    )
    use_cpu_initialization: bool = flag(False, "Initialize weights on the CPU; their values are the same either way.")
    manual_gc: bool = flag(False, "Run Python's garbage collector at the same iterations on all workers.")
    manual_gc_interval: int = flag(0, "Iterations between collections with --manual-gc; 0 for none.", limits=">= 0")


@dataclass(frozen=True)
class RngFlags(FlagGroup):
    """Random numbers and initialization."""

    seed: int = flag(1234, "Seed of all random numbers.", limits=">= 1")
    init_method_std: float = flag(0.02, "Standard deviation of the initial weights.", limits="> 0")
    initialization: str = flag(
        "exact",
        "How initial weights are drawn: exact is from the seed and the name of each weight, with the same bits in "
        "every layout; stock is Megatron-LM's, from the seed and the layout, the default of its scripts.",
        choices=("exact", "stock"),
    )
