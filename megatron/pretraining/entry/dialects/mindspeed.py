"""Options of MindSpeed-LLM (gitcode.com/Ascend/MindSpeed-LLM) that megatron-core has an equivalent for."""

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


RULES: dict[str, Rule] = {
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
DIALECT = Dialect("mindspeed", "MindSpeed-LLM", RULES)
