"""Options of older releases of Megatron-LM, which programs derived from it have as well."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from megatron.pretraining.entry.dialects.rules import (
    Dialect,
    Line,
    OptionOutcome,
    Rule,
    becomes,
    ignored,
    of_value,
    refused_option,
    renamed,
    same,
)

_SPEED = "it changed only speed"
_SINGLE_IMPLEMENTATION = "megatron-core has one implementation"
_MAX_STEPS = 4096
_MAX_SAMPLES = 1 << 62


def recompute_all(line: Line, values: Sequence[str]) -> OptionOutcome:
    """Recomputes the activations of all layers, as ``--checkpoint-activations`` did."""
    if "--recompute-granularity" in line or "--recompute-activations" in line:
        return OptionOutcome(why="--recompute-granularity says more")
    method = line.text("--activations-checkpoint-method", line.text("--checkpoint-method", "uniform"))
    layers = line.text("--activations-checkpoint-num-layers", line.text("--checkpoint-num-layers", "1"))
    words = ("--recompute-granularity", "full", "--recompute-method", method, "--recompute-num-layers", layers)
    return OptionOutcome(words)


def _ramp(line: Line, values: Sequence[str]) -> OptionOutcome:
    """Converts ``--rampup-batch-size START STEP SAMPLES`` to ``--step-batch-size-schedule`` (thresholds in tokens)."""
    try:
        start, step, samples = (int(float(value)) for value in values)
        last, length = line.count("--global-batch-size"), line.count("--seq-length")
        steps = (last - start) // step
        if steps < 1 or (last - start) % step or not length or steps > _MAX_STEPS or samples > _MAX_SAMPLES:
            raise ValueError
    except (ValueError, OverflowError, ZeroDivisionError):
        return OptionOutcome(
            problem="the batch does not grow in equal steps from the first number to --global-batch-size",
            fix="correct the numbers, or choose --step-batch-size-schedule",
        )
    # a step is made with the first iteration whose samples before it reach the threshold
    sizes = [(math.ceil(number * samples / steps) * length, start + number * step) for number in range(steps + 1)]
    schedule = ",".join(f"{tokens}:{size}" for tokens, size in dict(sizes).items())  # the last size of a threshold
    return OptionOutcome(("--step-batch-size-schedule", schedule), "thresholds in tokens")


def _batch(line: Line, values: Sequence[str]) -> OptionOutcome:
    if "--rampup-batch-size" in line:
        return OptionOutcome(why="the last entry of --step-batch-size-schedule is the same")
    return OptionOutcome(("--global-batch-size", *values))


def _overlap(line: Line, values: Sequence[str]) -> OptionOutcome:
    if line.count("--tensor-model-parallel-size", 1) == 1:
        return OptionOutcome(why="there is one tensor-parallel worker")
    return OptionOutcome(("--tp-comm-overlap", *values))


def _unless_empty(option: str) -> Rule:
    """Returns the rule for an option whose value may be missing because a script's variable was empty."""
    return lambda line, values: (
        OptionOutcome((option, *values)) if any(values) else OptionOutcome(why="it has no value")
    )


def _experiment(line: Line, values: Sequence[str]) -> OptionOutcome:
    """Completes the name of an experiment, which W&B needs; a script's variable may be empty."""
    if any(values):
        return OptionOutcome(("--wandb-exp-name", *values))
    name = os.path.basename(line.text("--save").rstrip("/")) or "pretraining"
    return OptionOutcome(("--wandb-exp-name", name), "it has no value")


def _numbers(line: Line, values: Sequence[str]) -> OptionOutcome:
    return OptionOutcome(("--hierarchical-context-parallel-sizes", *" ".join(values).split()))


def _layout(line: Line, values: Sequence[str]) -> OptionOutcome:
    return OptionOutcome(("--pipeline-model-parallel-layout", *(value.replace("\\", "") for value in values)))


RULES: dict[str, Rule] = {
    "--pipeline-model-parallel-layout": _layout,
    "--wandb-project": _unless_empty("--wandb-project"),
    "--wandb-save-dir": _unless_empty("--wandb-save-dir"),
    "--wandb-entity": _unless_empty("--wandb-entity"),
    "--wandb-exp-name": _experiment,
    "--hierarchical-context-parallel-sizes": _numbers,
    "--export-qk-l2-norm": becomes("--qk-l2-norm"),
    "--export-moe-apply-probs-on-input": becomes("--moe-apply-probs-on-input"),
    "--DDP-impl": ignored(_SINGLE_IMPLEMENTATION),
    "--use-legacy-models": ignored("megatron-core's models take the place of Megatron-LM's legacy models"),
    "--no-query-key-layer-scaling": ignored("it is the default"),
    "--no-async-tensor-model-parallel-allreduce": ignored(_SPEED),
    "--no-contiguous-buffers-in-local-ddp": ignored(_SINGLE_IMPLEMENTATION),
    "--log-batch-size-to-tensorboard": ignored("the batch size is always logged"),
    "--log-learning-rate-to-tensorboard": ignored("the learning rate is always logged"),
    "--data-impl": of_value(
        {"mmap": ignored("it is the only format"), "infer": ignored("the format is always mmap")},
        refused_option("only data in the format mmap are read", "convert the data with tools/preprocess_data.py"),
    ),
    "--use-flash-attn-v2": becomes("--use-flash-attn"),
    "--use-flash-attn-triton": becomes("--use-flash-attn"),
    "--checkpoint-activations": recompute_all,
    "--activations-checkpoint-method": recompute_all,
    "--activations-checkpoint-num-layers": ignored("it is part of --recompute-num-layers"),
    "--checkpoint-num-layers": ignored("it is part of --recompute-num-layers"),
    "--layernorm-epsilon": renamed("--norm-epsilon"),
    "--use-custom-fsdp": becomes("--use-megatron-fsdp"),
    "--override-lr-scheduler": becomes("--override-opt-param-scheduler"),
    "--override-opt_param-scheduler": becomes("--override-opt-param-scheduler"),
    "--use-checkpoint-lr-scheduler": becomes("--use-checkpoint-opt-param-scheduler"),
    "--use-checkpoint-opt_param-scheduler": becomes("--use-checkpoint-opt-param-scheduler"),
    "--rampup-batch-size": _ramp,
    "--global-batch-size": _batch,
    "--tp-comm-overlap": _overlap,
    "--cross-entropy-fusion-impl": of_value(
        {"te": becomes("--cross-entropy-fusion-impl", "native", why="Megatron-LM has disabled the other kernel")},
        same("--cross-entropy-fusion-impl"),
    ),
    "--normalization": renamed("--normalization", rmsnorm="RMSNorm", layernorm="LayerNorm"),
    "--rank": ignored("the launcher numbers the workers"),
    "--local_rank": ignored("the launcher numbers the workers"),
    "--world-size": ignored("the launcher counts the workers"),
    "--dist-url": ignored("the launcher connects the workers"),
}
DIALECT = Dialect("megatron-lm", "older releases of Megatron-LM", RULES)
