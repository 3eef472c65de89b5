"""Options of MindSpeed-LLM, Pai-Megatron-Patch and FlagScale, with their equivalents in megatron-core.

Sources: gitcode.com/Ascend/MindSpeed-LLM, github.com/alibaba/Pai-Megatron-Patch, github.com/flagos-ai/FlagScale.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.pretraining.config.layer_pattern import MOST_LAYERS
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

_SPEED = ignored("it changed only speed")
_MEMORY = ignored("it changed only memory")
_WEIGHTS = refused_option(
    "weights of Hugging Face are not converted when training starts", "convert them with tools/convert_checkpoint.py"
)

_PACKED = ignored("samples of indexed data have --seq-length tokens")
_OF_TRANSFORMERS = becomes("--tokenizer-type", "HuggingFaceTokenizer")

_FLAGSCALE_RULES: dict[str, Rule] = {
    "--tokenizer-type": of_value(
        {
            "QwenTokenizerFS": _OF_TRANSFORMERS,
            "Qwen2TokenizerFS": _OF_TRANSFORMERS,
            "Llama3TokenizerFS": _OF_TRANSFORMERS,
            "HFTokenizerFS": _OF_TRANSFORMERS,
            "AquilaTokenizerFS": refused_option("there is no such tokenizer", "choose HuggingFaceTokenizer"),
        },
        same("--tokenizer-type"),
    ),
    "--tokenizer-path": renamed("--tokenizer-model"),
    "--rampup-save-interval": ignored("--save-interval holds from the start"),
}
FLAGSCALE = Dialect("flagscale", "FlagScale", _FLAGSCALE_RULES)


def _dense_layers(line: Line, values: Sequence[str]) -> OptionOutcome:
    layers = min(line.count("--num-layers"), MOST_LAYERS)
    dense = min(max(line.count("--first-k-dense-replace"), 0), layers)
    return OptionOutcome(("--moe-layer-freq", f"[{','.join(['0'] * dense + ['1'] * (layers - dense))}]"))


def _shared_experts(line: Line, values: Sequence[str]) -> OptionOutcome:
    width = line.count("--moe-intermediate-size", line.count("--moe-ffn-hidden-size", line.count("--ffn-hidden-size")))
    return OptionOutcome(("--moe-shared-expert-intermediate-size", str(line.count("--n-shared-experts") * width)))


def _normalized(line: Line, values: Sequence[str]) -> OptionOutcome:
    if "--moe-router-pre-softmax" in line:
        return OptionOutcome(problem="it contradicts --moe-router-pre-softmax", fix="drop one of them")
    return OptionOutcome(why="probabilities of the selected experts always sum up to 1")


_MINDSPEED_RULES: dict[str, Rule] = {
    "--tokenizer-type": of_value(
        {"PretrainedFromHF": becomes("--tokenizer-type", "HuggingFaceTokenizer")}, same("--tokenizer-type")
    ),
    "--tokenizer-name-or-path": renamed("--tokenizer-model"),
    "--no-shared-storage": ignored("each node builds the indices of data that it lacks"),
    "--handler-name": ignored("it is of the preprocessing of data"),
    "--context-parallel-algo": of_value(
        {
            "ulysses_cp_algo": becomes("--cp-comm-type", "a2a"),
            "megatron_cp_algo": becomes("--cp-comm-type", "p2p"),
        },
        refused_option("megatron-core has no such algorithm", "choose --cp-comm-type"),
    ),
    "--moe-token-dispatcher-type": renamed("--moe-token-dispatcher-type", alltoall_seq="alltoall"),
    "--first-k-dense-replace": integer(_dense_layers),
    "--moe-intermediate-size": renamed("--moe-ffn-hidden-size"),
    "--n-shared-experts": integer(_shared_experts),
    "--shared-expert-gate": becomes("--moe-shared-expert-gate"),
    "--norm-topk-prob": _normalized,
    "--routed-scaling-factor": renamed("--moe-router-topk-scaling-factor"),
    "--n-group": renamed("--moe-router-num-groups"),
    "--topk-group": renamed("--moe-router-group-topk"),
    "--router-gating-in-fp32": becomes("--moe-router-dtype", "fp32"),
    "--multi-head-latent-attention": becomes("--multi-latent-attention"),
    "--qk-nope-head-dim": renamed("--qk-head-dim"),
    "--qk-rope-head-dim": renamed("--qk-pos-emb-head-dim"),
    "--num-nextn-predict-layers": renamed("--mtp-num-layers"),
    "--enable-hf2mg-convert": _WEIGHTS,
    "--enable-mg2hf-convert": _WEIGHTS,
    "--model-type-hf": _WEIGHTS,
    "--disable-gloo-group": ignored("groups of gloo are not made"),
    **dict.fromkeys(
        (
            "--use-fused-rotary-pos-emb", "--use-fused-swiglu", "--use-fused-rmsnorm", "--moe-permutation-async-comm",
            "--gemm-gradient-accumulation-fusion", "--use-fused-moe-token-permute-and-unpermute",
            "--moe-alltoall-overlap-comm", "--moe-fb-overlap", "--mla-fa-without-pad", "--mla-mm-split",
            "--shape-order", "--use-cp-send-recv-overlap", "--use-fused-ring-attention-update", "--use-ascend-mc2",
            "--use-ascend-coc", "--coc-fused-kernel", "--enable-mla-absorb",
        ),
        _SPEED,
    ),
    **dict.fromkeys(
        (
            "--reuse-fp32-param", "--swap-optimizer", "--swap-attention", "--recompute-activation-function",
            "--output-layer-slice-num", "--mtp-mem-efficient-logits",
        ),
        _MEMORY,
    ),
}  # fmt: skip
MINDSPEED = Dialect("mindspeed", "MindSpeed-LLM", _MINDSPEED_RULES)


def _tokenizer(line: Line, values: Sequence[str]) -> OptionOutcome:
    """Uses the tokenizer of the model in ``--load``, as Pai does."""
    words = ("--tokenizer-type", "HuggingFaceTokenizer")
    if "--tokenizer-model" in line:
        return OptionOutcome(words)
    if not (directory := line.text("--load")):
        return OptionOutcome(problem="no directory has the tokenizer", fix="choose --tokenizer-model")
    return OptionOutcome((*words, "--tokenizer-model", directory), "the tokenizer is in --load")


_PAI_RULES: dict[str, Rule] = {
    "--patch-tokenizer-type": _tokenizer,
    "--tokenizer-type": ignored("--patch-tokenizer-type is given"),
    "--dataset": of_value(
        {"MMAP": _PACKED, "LLama-Pretrain-Idxmap": _PACKED},
        refused_option("only indexed data are read", "convert the data with tools/preprocess_data.py"),
    ),
    "--max-padding-length": _PACKED,
    "--train-mode": of_value(
        {"pretrain": ignored("it is the only mode")}, refused_option("this program only pre-trains")
    ),
    "--extra-vocab-size": ignored("it added rows of the embedding that no token has"),
    "--qk-nope-head-dim": renamed("--qk-head-dim"),
    "--qk-rope-head-dim": renamed("--qk-pos-emb-head-dim"),
}
PAI = Dialect("pai", "Pai-Megatron-Patch", _PAI_RULES)
