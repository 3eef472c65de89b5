"""Options of Megatron-DeepSpeed (github.com/deepspeedai/Megatron-DeepSpeed) and of BigScience's copy of it.

Their model of experts has other defaults than Megatron-LM's: the last of every two layers has experts, one expert gets
a token, the auxiliary loss has the weight 0.1, and experts drop tokens beyond their even share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.pretraining.config.layer_pattern import from_interval
from megatron.pretraining.entry.dialects.older_megatron import recompute_all
from megatron.pretraining.entry.dialects.rules import (
    Dialect,
    Line,
    OptionOutcome,
    Rule,
    becomes,
    ignored,
    integer,
    of_value,
    refused_option,
    renamed,
    same,
)

_ENGINE_DECIDES = "the engine decides"
_LAYOUT = "checkpoints load in any layout anyway"
_RECOMPUTES = "it moved activations, and megatron-core recomputes them"
_NO_NUMBER = OptionOutcome(problem="it is not a number", fix="correct it")
_NO_DISTILLATION = refused_option("there is no distillation", "train without a teacher")
_NO_POSITIONS = refused_option("megatron-core has no such position embedding", "choose --position-embedding-type rope")


def _experts(line: Line) -> list[int]:
    words = line.text("--num-experts").split()
    return [int(word) for word in words if word.isdecimal()]


def _has_experts(line: Line) -> bool:
    return max(_experts(line), default=1) > 1


def _num_experts(line: Line, values: Sequence[str]) -> OptionOutcome:
    experts = _experts(line)
    if len(experts) < max(len(values), 1):
        return OptionOutcome(("--num-experts", *values))  # Megatron-LM's parser refuses the value
    if not _has_experts(line):
        return OptionOutcome(why="one expert is a dense layer")
    if len(set(experts)) > 1:
        return OptionOutcome(
            problem="megatron-core has the same number of experts in each layer that has any", fix="give one number"
        )
    return OptionOutcome(("--num-experts", str(experts[0])))


def _if_experts(rule: Rule) -> Rule:
    """Returns a rule that ignores the option in models without experts."""
    return lambda line, values: (
        rule(line, values) if _has_experts(line) else OptionOutcome(why="the model has no experts")
    )


def _drops_tokens(line: Line) -> bool:
    return "--disable-moe-token-dropping" not in line


def _capacity(line: Line, values: Sequence[str]) -> OptionOutcome:
    if not _drops_tokens(line):
        return OptionOutcome(why="no token is dropped")
    return OptionOutcome(("--moe-expert-capacity-factor", *values))


def _evaluated_capacity(line: Line, values: Sequence[str]) -> OptionOutcome:
    return OptionOutcome(why="evaluations use --moe-expert-capacity-factor, too")


def _min_capacity(line: Line, values: Sequence[str]) -> OptionOutcome:
    """Ignores an expert's minimum number of tokens if its even share is larger; otherwise refuses it."""
    tokens = line.count("--micro-batch-size", 1) * line.count("--seq-length") * line.count("--topk", 1)
    factor = line.number("--moe-train-capacity-factor", 1.0) or 1.0
    share = math.ceil(tokens * factor / max(_experts(line), default=1))
    if _drops_tokens(line) and line.count("--moe-min-capacity", 4) > share:
        return OptionOutcome(
            problem="megatron-core has no least capacity, and the even share is smaller", fix="lower it"
        )
    return OptionOutcome(why="the even share is larger")


def _layers(line: Line, interval: int) -> str:
    pattern = from_interval(interval, line.count("--num-layers"))
    return f"[{','.join(map(str, pattern))}]"


def _interval(line: Line, values: Sequence[str]) -> OptionOutcome:
    return OptionOutcome(("--moe-layer-freq", _layers(line, max(line.count("--expert-interval", 2), 1))))


def _topk(line: Line, values: Sequence[str]) -> OptionOutcome:
    # with k = 1, the softmax over all experts scales the output; with k = 2, the softmax over the two chosen experts
    return OptionOutcome(("--moe-router-topk", *values, *(("--moe-router-pre-softmax",) if [*values] == ["1"] else ())))


def _mlp(line: Line, values: Sequence[str]) -> OptionOutcome:
    if [*values] == ["residual"]:
        instead = "choose --moe-shared-expert-intermediate-size, whose experts process every token"
        return OptionOutcome(problem="megatron-core has no residual experts", fix=instead)
    return OptionOutcome(why="it is the only kind")


def _samples(line: Line, option: str) -> int:
    """Returns the number of samples of an option that is given in tokens."""
    return math.ceil(line.count(option) / max(line.count("--seq-length", 1), 1))


def _by_iterations(line: Line) -> bool:
    return "--train-iters" in line and "--train-samples" not in line


def _iterations(line: Line, samples: int) -> int:
    return math.ceil(samples / max(line.count("--global-batch-size", 1), 1))


def _train_tokens(line: Line, values: Sequence[str]) -> OptionOutcome:
    """Applies the first of both limits of training."""
    if line.number("--train-tokens") is None:
        return _NO_NUMBER
    samples = _samples(line, "--train-tokens")
    if _by_iterations(line):
        iterations = min(_iterations(line, samples), line.count("--train-iters"))
        return OptionOutcome(("--train-iters", str(iterations)))
    return OptionOutcome(("--train-samples", str(min(samples, line.count("--train-samples", samples)))))


def _unless_tokens(option: str, tokens: str) -> Rule:
    """Returns the rule for an option that an option in tokens overrides."""

    def rule(line: Line, values: Sequence[str]) -> OptionOutcome:
        if tokens in line and line.text(tokens):
            return OptionOutcome(why=f"{tokens} is given")
        return OptionOutcome((option, *values))

    return rule


def _schedule(kind: str) -> Rule:
    """Returns the rule that converts ``--lr-decay-tokens`` or ``--lr-warmup-tokens`` to iterations or samples."""

    def rule(line: Line, values: Sequence[str]) -> OptionOutcome:
        if line.number(f"--lr-{kind}-tokens") is None:
            return _NO_NUMBER
        samples = _samples(line, f"--lr-{kind}-tokens")
        if _by_iterations(line):
            return OptionOutcome((f"--lr-{kind}-iters", str(_iterations(line, samples))))
        return OptionOutcome((f"--lr-{kind}-samples", str(samples)))

    return rule


def _loss_scale(line: Line, values: Sequence[str]) -> OptionOutcome:
    if "--deepspeed" in line and "--deepspeed_config" in line:
        return OptionOutcome(why="DeepSpeed takes it from its configuration")
    if line.number("--loss-scale") == 0:
        return OptionOutcome(why="0 is the dynamic loss scale, which is the default")
    return OptionOutcome(("--loss-scale", *values))


def _sequence_parallel(line: Line, values: Sequence[str]) -> OptionOutcome:
    if [*values] == ["1"]:
        return OptionOutcome(why="it is the default")
    return OptionOutcome(("--context-parallel-size", *values, "--cp-comm-type", "a2a"), "Ulysses")


def _queries(line: Line, values: Sequence[str]) -> OptionOutcome:
    if line.text("--num-key-value-heads") == line.text("--num-attention-heads"):
        return OptionOutcome(why="each head has its own keys and values")
    return OptionOutcome(("--group-query-attention", "--num-query-groups", *values))


def _padded(line: Line, values: Sequence[str]) -> OptionOutcome:
    size, workers = line.count("--pad-vocab-size-to"), max(line.count("--tensor-model-parallel-size", 1), 1)
    if not size or size % workers:
        return OptionOutcome(
            problem=f"the rows are no multiple of {workers} tensor-parallel workers", fix="change one of them"
        )
    return OptionOutcome(("--make-vocab-size-divisible-by", str(size // workers)))


def _partition(line: Line, values: Sequence[str]) -> OptionOutcome:
    method = line.text("--pp-partition-method").strip("'\"").lower()
    if method == "type:transformer|embedding":
        words = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
        return OptionOutcome(words, "a stage with an embedding has a layer less")
    if method in ("type:transformer", "uniform"):
        return OptionOutcome(why="all stages have the same number of layers")
    return OptionOutcome(problem="stages are not divided by this method", fix="choose --pipeline-model-parallel-layout")


_TOKENIZERS = {"PretrainedFromHF": becomes("--tokenizer-type", "HuggingFaceTokenizer")}

RULES: dict[str, Rule] = {
    "--num-experts": _num_experts,
    "--topk": _if_experts(_topk),
    "--expert-interval": _if_experts(integer(_interval)),
    "--moe-expert-parallel-size": _if_experts(renamed("--expert-model-parallel-size")),
    "--moe-loss-coeff": _if_experts(renamed("--moe-aux-loss-coeff")),
    "--moe-train-capacity-factor": _if_experts(_capacity),
    "--moe-eval-capacity-factor": _if_experts(_evaluated_capacity),
    "--moe-min-capacity": _if_experts(_min_capacity),
    "--disable-moe-token-dropping": ignored("without a capacity, no token is dropped"),
    "--disable-moe-top2-2nd-expert-sampling": ignored("the second expert is never drawn"),
    "--enable-expert-tensor-parallelism": ignored("it is the default"),
    "--use-tutel": ignored("it changed only speed"),
    "--create-moe-param-group": ignored("experts always have their own parameter groups"),
    "--mlp-type": _mlp,
    "--no-pipeline-parallel": ignored("one stage needs no pipeline"),
    "--deepspeed-activation-checkpointing": ignored("--recompute-granularity selects the activations"),
    "--checkpoint-activations": recompute_all,
    "--checkpoint-in-cpu": ignored(_RECOMPUTES),
    "--partition-activations": ignored(_RECOMPUTES),
    "--contigious-checkpointing": ignored(_RECOMPUTES),
    "--synchronize-each-layer": ignored(_RECOMPUTES),
    "--profile-backward": ignored("it measured DeepSpeed's recomputation"),
    "--train-tokens": _train_tokens,
    "--train-iters": _unless_tokens("--train-iters", "--train-tokens"),
    "--train-samples": _unless_tokens("--train-samples", "--train-tokens"),
    "--lr-decay-tokens": _schedule("decay"),
    "--lr-decay-iters": _unless_tokens("--lr-decay-iters", "--lr-decay-tokens"),
    "--lr-decay-samples": _unless_tokens("--lr-decay-samples", "--lr-decay-tokens"),
    "--lr-warmup-tokens": _schedule("warmup"),
    "--lr-warmup-iters": _unless_tokens("--lr-warmup-iters", "--lr-warmup-tokens"),
    "--lr-warmup-samples": _unless_tokens("--lr-warmup-samples", "--lr-warmup-tokens"),
    "--loss-scale": _loss_scale,
    "--ds-sequence-parallel-size": _sequence_parallel,
    "--num-key-value-heads": _queries,
    "--rotary-position-embeddings-theta": renamed("--rotary-base"),
    "--log-optimizer-states-to-tensorboard": ignored("statistics of the optimizer state are not logged"),
    "--universal-checkpoint": ignored(_LAYOUT),
    "--load-tag": refused_option("checkpoints have no tags", "choose --ckpt-step"),
    "--remote-device": of_value({"none": ignored("it is the default")}, refused_option("weights stay on the device")),
    "--zero-contigious-gradients": ignored(_ENGINE_DECIDES),
    "--zero-reduce-scatter": ignored(_ENGINE_DECIDES),
    "--cpu_torch_adam": ignored(_ENGINE_DECIDES),
    "--ds-sequence-parallel-fpdt": refused_option("sequences are not cut into chunks of the host's memory"),
    "--curriculum-learning-legacy": refused_option("sequences have one length"),
    "--mos": _NO_DISTILLATION,
    "--kd": _NO_DISTILLATION,
    "--load-teacher": _NO_DISTILLATION,
    # of BigScience's copy
    "--embed-layernorm": refused_option("megatron-core has no norm after the embedding"),
    "--abort-on-unmet-fused-kernel-constraints": ignored("kernels check their own limits"),
    "--pad-vocab-size-to": integer(_padded),
    "--pp-partition-method": _partition,
    "--codecarbon-dir": ignored("carbon is not estimated"),
    "--log-level": ignored("messages have no levels"),
    "--log-level-replica": ignored("messages have no levels"),
    "--tokenizer-name-or-path": renamed("--tokenizer-model"),
    "--tokenizer-type": of_value(_TOKENIZERS, same("--tokenizer-type")),
    "--position-embedding-type": of_value(
        {"rotary": becomes("--position-embedding-type", "rope"), "alibi": _NO_POSITIONS},
        same("--position-embedding-type"),
    ),
    "--mup": refused_option("widths are not scaled by this parametrization", "choose Megatron-LM's --use-mup"),
    "--train-weighted-split-paths-path": refused_option(
        "files of data paths are not read", "choose --per-split-data-args-path"
    ),
    "--valid-weighted-split-paths-path": refused_option(
        "files of data paths are not read", "choose --per-split-data-args-path"
    ),
}


def _defaults(line: Line) -> Sequence[OptionOutcome]:
    """Returns defaults of Megatron-DeepSpeed that differ from Megatron-LM's."""
    outcomes, why = [], "the default of Megatron-DeepSpeed"
    if "--max-position-embeddings" not in line and "--seq-length" in line:
        outcomes.append(
            OptionOutcome(("--max-position-embeddings", line.text("--seq-length")), "rotary embeddings have no limit")
        )
    if not _has_experts(line):
        return outcomes
    outcomes.append(
        OptionOutcome(("--moe-token-dispatcher-type", "alltoall"), "the only dispatcher of Megatron-DeepSpeed")
    )
    if "--expert-interval" not in line:
        outcomes.append(OptionOutcome(("--moe-layer-freq", _layers(line, 2)), why))
    if "--topk" not in line:
        outcomes.append(OptionOutcome(("--moe-router-topk", "1", "--moe-router-pre-softmax"), why))
    if "--moe-loss-coeff" not in line:
        outcomes.append(OptionOutcome(("--moe-aux-loss-coeff", "0.1"), why))
    if _drops_tokens(line):
        if "--moe-train-capacity-factor" not in line:
            outcomes.append(OptionOutcome(("--moe-expert-capacity-factor", "1.0"), why))
        outcomes.append(
            OptionOutcome(("--moe-token-drop-policy", "position"), "Megatron-DeepSpeed draws the dropped tokens")
        )
    if "--enable-expert-tensor-parallelism" not in line and line.count("--tensor-model-parallel-size", 1) > 1:
        outcomes.append(OptionOutcome(("--expert-tensor-parallel-size", "1"), why))
    return outcomes


DIALECT = Dialect("megatron-deepspeed", "Megatron-DeepSpeed", RULES, _defaults, frozenset({"--deepspeed"}))
