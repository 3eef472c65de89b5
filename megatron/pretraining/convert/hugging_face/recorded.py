"""What a model is, beside its tensors: as a checkpoint records it, or as flags say."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from megatron.pretraining.process import cpu
from moc.errors import code_of

cpu.install()  # comes before megatron.core
from megatron.pretraining.arguments import parse_config  # noqa: E402
from megatron.pretraining.checkpoint import contents  # noqa: E402
from megatron.pretraining.config import Config, compose  # noqa: E402
from megatron.pretraining.config.flag import ConfigError, flags_of  # noqa: E402
from megatron.pretraining.config.moe import MoeFlags  # noqa: E402
from megatron.pretraining.config.network import NetworkFlags  # noqa: E402
from megatron.pretraining.data.tokenizer import TokenizerError, build_tokenizer  # noqa: E402
from moc.state.record import Position  # noqa: E402
from moc.store.errors import CheckpointError  # noqa: E402

_HOW_IT_RUNS = (  # what depends on the machine, or on a layout, and not on the model
    "transformer_impl", "attention_backend", "moe_grouped_gemm", "moe_token_dispatcher_type", "moe_permute_fusion",
    "moe_shared_expert_overlap", "moe_per_layer_logging", "make_vocab_size_divisible_by", "expert_interval",
)  # fmt: skip
_LONGEST = 4096  # tokens of a sample, where only the model says how many there may be


def recorded(state: Mapping[str, Any], argv: Sequence[str], where: object) -> tuple[Mapping, Mapping | None]:
    """Model and tokenizer of a checkpoint, by its state, or by the flags of its run if it does not record them.

    Raises:
        CheckpointError: there is neither, or flags are of another model.
    """
    if state.get("model"):
        return state["model"], state.get("tokenizer")
    if not argv:
        raise CheckpointError(
            f"{where} does not record its model, since an earlier version wrote it. Fix: give the flags of the run "
            "behind --",
            code="model-not-recorded",
        )
    config = parse_config(list(argv))
    contents.check_shape(config, state.get("shape") or {}, where)
    flags = config.tokenizer
    try:
        made = build_tokenizer(flags.tokenizer_type, flags.tokenizer_model, flags.vocab_size, flags.tokenizer_revision)
    except TokenizerError as error:
        raise CheckpointError(str(error), code=code_of(error)) from None
    return contents.model(config, made.vocab_size), contents.tokenizer(flags)


def composed(model: Mapping[str, Any], **more: object) -> Config:
    """All flags of a run with a model; raises CheckpointError if this program cannot train it."""
    try:
        return compose(as_flags(model) | _OF_NO_RUN | dict(vocab_size=model["vocab_size"] - 1) | more)
    except ConfigError as error:
        raise CheckpointError(f"this program cannot compute the model: {error}", code=code_of(error)) from None


_OF_NO_RUN: dict[str, Any] = dict(
    micro_batch_size=1, train_iters=1, lr=1e-3, mock_data=True, seq_length=1, tokenizer_type="NullTokenizer",
    make_vocab_size_divisible_by=1,
)  # fmt: skip


def as_flags(model: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a model's own flags by field; what has its default is left out."""
    known = _fields()
    return {
        name: model[name]
        for name, default in known.items()
        if name not in _HOW_IT_RUNS and model.get(name) is not None and model[name] != default
    }


def recipe(model: Mapping[str, Any], dtype: str, tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Values for ``--config``: the model, how it computes, and what reads its data."""
    dtypes = {} if dtype == "fp32" else {dtype: True}
    length = dict(seq_length=min(model["max_position_embeddings"], _LONGEST))
    return as_flags(model) | dict(make_vocab_size_divisible_by=1) | dtypes | length | dict(tokenizer)


def first_state(model: Mapping[str, Any], dtype: str, tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """``training_state.json`` of a checkpoint that no run has written."""
    config = composed(model)
    said = {name: tokenizer.get(f"tokenizer_{name}") for name in ("type", "model", "revision")}
    return {
        **asdict(Position()),
        "optimizer": None,
        "optimizer_step": 0,
        "params_dtype": dtype,
        "scheduler": None,
        "grad_scaler": None,
        "shape": contents.shape(config),
        "sample_order": {},
        "model": contents.model(config, model["vocab_size"]),
        "tokenizer": said,
    }


@functools.cache
def _fields() -> dict[str, Any]:
    """Defaults by field."""
    return {flag.name: flag.default for group in (NetworkFlags, MoeFlags) for flag in flags_of(group)}
