"""Options of this project's previous release, whose program had its own parser."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron.pretraining.config.flag import flags_of
from megatron.pretraining.config.groups import group_classes
from megatron.pretraining.config.layer_pattern import from_interval
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
)
from megatron.pretraining.entry.own_flags import OWN_GROUPS
from megatron.pretraining.presets import PRESETS

_NEVER = "1000000000"
_ACCEPTED = ignored("it had no effect")
_DEFAULT = "it is the default"


def _switched_on(name: str, off: str) -> Rule:
    """Returns the rule for an option that a later ``off`` turned off, such as on a command line after a file."""

    def rule(line: Line, values: Sequence[str]) -> OptionOutcome:
        if line.comes_later(off, name):
            return OptionOutcome(why=f"{off} turns it off")
        return OptionOutcome((name, *values))

    return rule


def _switched_off(on: str) -> Rule:
    """Returns the rule for the opposite of ``on``, which Megatron-LM's parser lacks, since it is the default."""
    key = on.removeprefix("--").replace("-", "_")

    def rule(line: Line, values: Sequence[str]) -> OptionOutcome:
        preset = PRESETS.get(line.text("--model"))
        if preset is not None and preset.values.get(key):
            return OptionOutcome(
                problem=f"--model {line.text('--model')} has {on}, and Megatron-LM has no option that turns it off",
                fix="give the options of the model in place of --model",
            )
        return OptionOutcome(why=_DEFAULT)

    return rule


def _switches(*options: str) -> dict[str, Rule]:
    """Returns rules for options that are off by default, and for their opposites."""
    rules: dict[str, Rule] = {}
    for name in options:
        off = f"--no-{name}"
        rules |= {f"--{name}": _switched_on(f"--{name}", off), off: _switched_off(f"--{name}")}
    return rules


def _numbers(*options: str) -> dict[str, Rule]:
    """Returns rules for options with a number that the word ``none`` unsets."""

    def rule_of(name: str) -> Rule:
        def rule(line: Line, values: Sequence[str]) -> OptionOutcome:
            if line.text(name).lower() != "none":
                return OptionOutcome((name, *values))
            preset = PRESETS.get(line.text("--model"))
            if preset is not None and preset.values.get(name.removeprefix("--").replace("-", "_")) is not None:
                problem = f"--model {line.text('--model')} has a value, and Megatron-LM's options cannot take it back"
                return OptionOutcome(problem=problem, fix="give the options of the model in place of --model")
            return OptionOutcome(why="it has no value")

        return rule

    return {f"--{name}": rule_of(f"--{name}") for name in options}


def _interval(line: Line, values: Sequence[str]) -> OptionOutcome:
    layers = line.count("--num-layers")
    if not layers and (preset := PRESETS.get(line.text("--model"))) is not None:
        layers = int(str(preset.values["num_layers"]))
    pattern = from_interval(max(line.count("--expert-interval", 1), 1), layers)
    return OptionOutcome(("--moe-layer-freq", f"[{','.join(map(str, pattern))}]"))


def _layers_of_stage(line: Line, values: Sequence[str]) -> OptionOutcome:
    if "none" in (word.lower() for word in values):
        return OptionOutcome(why="it has no value")
    if line.count("--num-virtual-stages-per-pipeline-rank"):
        return OptionOutcome(why="--num-virtual-stages-per-pipeline-rank follows from it")
    return OptionOutcome(("--num-layers-per-virtual-pipeline-stage", *values))


def _dispatcher(line: Line, values: Sequence[str]) -> OptionOutcome:
    if "--elastic" in line:
        return OptionOutcome(("--moe-token-dispatcher-type", "alltoall"), "--elastic has a dispatcher in its place")
    return OptionOutcome(("--moe-token-dispatcher-type", *values))


def _constant(option: str) -> Rule:
    """Returns the first or last weight decay, which Megatron-LM refuses if the weight decay is constant."""

    def rule(line: Line, values: Sequence[str]) -> OptionOutcome:
        constant = line.text("--weight-decay-incr-style", "constant") == "constant"
        if constant and line.number(option) == line.number("--weight-decay", 0.01):
            return OptionOutcome(why="the weight decay is constant")
        return OptionOutcome((option, *values))

    return rule


def _commit(line: Line, values: Sequence[str]) -> OptionOutcome:
    """Returns the directory of a tokenizer's commit in the cache of Hugging Face's hub."""
    return OptionOutcome(why="the directory of this commit in the hub's cache becomes --tokenizer-model")


def _tokenizer(line: Line, values: Sequence[str]) -> OptionOutcome:
    commit, name = line.text("--tokenizer-revision"), " ".join(values)
    if not commit or not name:
        return OptionOutcome(("--tokenizer-model", *values))
    home = os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", os.path.join(home, "hub")))
    directory = cache / f"models--{name.replace('/', '--')}" / "snapshots" / commit
    return OptionOutcome(("--tokenizer-model", str(directory)), "this commit in the hub's cache")


_OFF_BY_DEFAULT = """
    group-query-attention rotary-interleaved swiglu squared-relu untie-embeddings-and-output-weights add-qkv-bias
    qk-layernorm moe-shared-expert-gate moe-shared-expert-overlap moe-grouped-gemm moe-router-pre-softmax
    moe-router-enable-expert-bias moe-per-layer-logging moe-pad-expert-input-to-capacity moe-permute-fusion
    sequence-parallel use-distributed-optimizer overlap-grad-reduce overlap-param-gather skip-train exit-signal-handler
    recompute-activations calculate-per-token-loss deterministic-mode use-cpu-initialization manual-gc
    override-opt-param-scheduler use-checkpoint-opt-param-scheduler fp16 bf16 fp32-residual-connection
    attention-softmax-in-fp32 apply-query-key-layer-scaling accumulate-allreduce-grads-in-fp32 mock-data
    reset-position-ids reset-attention-mask eod-mask-loss async-save finetune exit-on-missing-checkpoint log-throughput
    log-params-norm log-num-zeros-in-grad log-timers-to-tensorboard log-memory-to-tensorboard
    log-validation-ppl-to-tensorboard
    """.split()
_ON_BY_DEFAULT = {
    "--add-bias-linear": "--disable-bias-linear",
    "--overlap-p2p-comm": "--no-overlap-p2p-communication",
    "--overlap-p2p-communication": "--no-overlap-p2p-communication",
    "--apply-rope-fusion": "--no-rope-fusion",
    **{
        f"--{name}": f"--no-{name}"
        for name in """
        check-for-nan-in-loss-and-grad mmap-bin-files save-optim save-rng load-optim load-rng masked-softmax-fusion
        bias-gelu-fusion bias-swiglu-fusion bias-dropout-fusion gradient-accumulation-fusion
        """.split()
    },
}
"""Opposites of options that Megatron-LM lacks because they are the default, by option."""
_NUMBERS = """
    ffn-hidden-size kv-channels num-query-groups max-position-embeddings num-experts moe-ffn-hidden-size
    moe-shared-expert-intermediate-size moe-router-topk-scaling-factor moe-router-num-groups moe-router-group-topk
    moe-z-loss-coeff moe-input-jitter-eps moe-expert-capacity-factor num-virtual-stages-per-pipeline-rank
    expert-tensor-parallel-size ddp-bucket-size elastic-slots zero-stage gradient-accumulation-steps global-batch-size
    train-iters train-samples exit-interval exit-duration-in-mins recompute-num-layers lr-decay-iters lr-decay-samples
    lr-warmup-fraction lr-wsd-decay-iters lr-wsd-decay-samples loss-scale vocab-size save-interval
    save-retain-interval ckpt-step max-snapshot-lag persist-interval replicas replication-rate mtbf-hours host-memory-gb
    pec-k-snapshot pec-k-persist selective-experts selective-local-gb selective-remote-gb selective-max-age
    selective-boost inject-mtbf-iterations eval-interval
    """.split()

RULES: dict[str, Rule] = {
    **_switches(*_OFF_BY_DEFAULT),
    **{on: ignored(_DEFAULT) for on in _ON_BY_DEFAULT},
    **{off: _switched_on(off, on) for on, off in _ON_BY_DEFAULT.items()},
    **_numbers(*_NUMBERS),
    "--topk": renamed("--moe-router-topk"),
    "--expert-interval": of_value({"none": ignored("it has no value")}, integer(_interval)),
    "--moe-loss-coeff": renamed("--moe-aux-loss-coeff"),
    "--moe-expert-parallel-size": renamed("--expert-model-parallel-size"),
    "--num-layers-per-virtual-pipeline-stage": _layers_of_stage,
    "--qk-layernorm-full-width": becomes("--spec", "megatron.pretraining.model.full_width", "layer_spec"),
    "--no-qk-layernorm-full-width": ignored(_DEFAULT),
    "--moe-token-dispatcher-type": _dispatcher,
    "--start-weight-decay": _constant("--start-weight-decay"),
    "--end-weight-decay": _constant("--end-weight-decay"),
    "--main-params-dtype": of_value(
        {"fp32": ignored("it is the only format")},
        refused_option("megatron-core's optimizers keep master weights in fp32", "continue with the previous release"),
    ),
    "--tokenizer-revision": _commit,
    "--tokenizer-model": _tokenizer,
    "--trust": ignored("a checkpoint without a manifest loads, and is not verified"),
    "--no-trust": ignored("a checkpoint without a manifest loads, and is not verified"),
    "--remote-device": of_value({"none": ignored(_DEFAULT)}, refused_option("weights stay on the device")),
    "--mlp-type": of_value({"standard": ignored(_DEFAULT)}, refused_option("megatron-core has no residual experts")),
    "--ds-sequence-parallel-size": of_value({"1": ignored(_DEFAULT)}, refused_option("it was refused, too")),
    "--deepspeed-activation-checkpointing": refused_option("it was refused, too", "choose --recompute-granularity"),
    "--use-flash-attn": ignored("--attention-backend selects the kernel"),
    "--no-use-flash-attn": ignored("--attention-backend selects the kernel"),
    "--no-use-mcore-models": _ACCEPTED,
    "--add-position-embedding": _ACCEPTED,
    "--no-position-embedding": ignored("it had no effect: --position-embedding-type selects the embedding"),
    "--no-deepspeed-activation-checkpointing": _ACCEPTED,
    **dict.fromkeys(
        (
            "--pipeline-parallel", "--no-pipeline-parallel", "--create-moe-param-group", "--no-create-moe-param-group",
            "--zero-reduce-scatter", "--no-zero-reduce-scatter", "--zero-contigious-gradients",
            "--no-zero-contigious-gradients", "--create-attention-mask-in-dataloader",
            "--no-create-attention-mask-in-dataloader",
        ),
        _ACCEPTED,
    ),
}  # fmt: skip


def _defaults(line: Line) -> Sequence[OptionOutcome]:
    """Returns defaults of the previous release that differ from Megatron-LM's."""
    outcomes = []
    if "--eval-interval" not in line:
        outcomes.append(OptionOutcome(("--eval-interval", _NEVER), "without an interval, it evaluated only at the end"))
    if "--fp8-format" in line and "--fp8-recipe" not in line:
        outcomes.append(OptionOutcome(("--fp8-recipe", "tensorwise"), "its default"))
    if "--elastic" in line and "--moe-token-dispatcher-type" not in line:
        outcomes.append(_dispatcher(line, ()))
    if "--correct" not in line:
        outcomes.append(OptionOutcome(("--correct", "none"), "losses keep their bits"))
    if "--transformer-impl" not in line and find_spec("transformer_engine") is None:
        outcomes.append(OptionOutcome(("--transformer-impl", "local"), "Transformer Engine is not installed"))
    return outcomes


_MARKS = """
    --model --log-dir --ckpt-policy --ckpt-dir --ckpt-tier --snapshot-interval --elastic --inject --save-failure
    """.split()
DIALECT = Dialect("moc", "the previous release of this project", RULES, _defaults, frozenset(_MARKS), needs_mark=True)


def is_configuration(content: Mapping[Any, Any]) -> bool:
    """Returns whether the content of a file has the form of ``--print-config``: groups of options."""
    groups = group_classes().keys() | {"fusion", "compatibility"}
    sections = [key for key, value in content.items() if isinstance(value, Mapping)]
    return bool(sections) and all(key in groups for key in sections)


def options_of_groups(content: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns the options in groups of ``--print-config``, by name.

    A complete file has all options of the model, including derived ones, so that it needs no ``--model``.
    Our own options at their defaults are left out: some of them need others.
    """
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= value if isinstance(value, Mapping) else {key: value}
    if "compatibility" in content:
        flat.pop("model", None)
    defaults = {flag.name: flag.default for group in OWN_GROUPS for flag in flags_of(group_classes()[group])}
    return {name: value for name, value in flat.items() if name not in defaults or str(value) != str(defaults[name])}


def words_of(name: str, value: object) -> Iterator[str] | None:
    """Returns the words of an option in a file, if the previous release has the option; otherwise None."""
    option = f"--{name}"
    if option not in RULES:
        return None
    if value is None:
        return iter(())
    return iter((option,) if value is True else (f"--no-{name}",) if value is False else (option, str(value)))
