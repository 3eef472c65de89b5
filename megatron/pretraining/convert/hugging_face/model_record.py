"""Reads the description of a model from a checkpoint's record, or from the options of its run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron.pretraining.process import cpu

cpu.install()  # must precede megatron.core
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer  # noqa: E402

from megatron.pretraining.config import Config  # noqa: E402
from megatron.pretraining.config.flag import ConfigError  # noqa: E402
from megatron.pretraining.convert.contents import shape_by_operator  # noqa: E402
from megatron.pretraining.convert.hugging_face.family import Described, described_model  # noqa: E402
from megatron.pretraining.convert.hugging_face.tokenizer import GenerationSettings  # noqa: E402
from megatron.pretraining.entry.model import tokenizer_of  # noqa: E402
from megatron.pretraining.entry.offline import config_of_words  # noqa: E402
from megatron.pretraining.entry.previous import check_flags, described_by_flags  # noqa: E402
from moc.errors import code_of  # noqa: E402
from moc.files import decode  # noqa: E402
from moc.state.record import Position  # noqa: E402
from moc.store.errors import CheckpointError  # noqa: E402
from moc.store.shard_file import TensorBox  # noqa: E402

_LONGEST = 4096  # maximum tokens of a sample if only the model limits them
_OF_NO_RUN = (
    "--micro-batch-size=1", "--train-iters=1", "--lr=1e-3", "--mock-data", "--tokenizer-type=NullTokenizer",
    "--make-vocab-size-divisible-by=1",
)  # fmt: skip
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Described)}


def recorded(state: Mapping[str, Any], argv: Sequence[str], where: object) -> tuple[Mapping, Mapping | None]:
    """Returns model and tokenizer of a checkpoint from its state, or if not recorded, from its run's options.

    Raises:
        CheckpointError: neither exists, or the options are invalid or describe another model.
    """
    if state.get("model"):
        return _with_vocabulary(state["model"]), state.get("tokenizer")
    if not argv:
        raise CheckpointError(
            f"{where} does not record its model, since an earlier version wrote it. Fix: give the flags of the run "
            "behind --",
            code="model-not-recorded",
        )
    args = _configured(argv).arguments
    values = vars(args) | {"vocab_size": args.vocab_size or build_tokenizer(args).vocab_size}
    if described_by_flags(shape := state.get("shape") or {}):
        check_flags(values, shape, where)
    return _with_vocabulary(values), tokenizer_of(values)


def as_options(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that describe a model by name, without default values."""
    values = dataclasses.asdict(described_model(model))
    if not values["group_query_attention"]:
        del values["num_query_groups"]
    return {name: value for name, value in values.items() if value != _DEFAULTS[name]}


def run_configuration(model: Mapping[str, Any], length: int) -> Config:
    """Returns the configuration of a run with a model on one worker; raises CheckpointError if it is invalid."""
    words = [f"--seq-length={length}", *_OF_NO_RUN]
    for name, value in as_options(model).items():
        spelling = f"--{name.replace('_', '-')}"
        if name == "add_bias_linear":
            words.append("--disable-bias-linear")
        elif name == "spec":
            words += [spelling, *value]
        elif isinstance(value, tuple):
            words.append(f"{spelling}=[{','.join(map(str, value))}]")
        else:
            words.append(spelling if value is True else f"{spelling}={value}")
    return _configured(words)


def recipe(model: Mapping[str, Any], dtype: str, tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options for ``--config``: model, arithmetic and tokenizer."""
    dtypes = {} if dtype == "fp32" else {dtype: True}
    length = dict(seq_length=min(model["max_position_embeddings"], _LONGEST))
    values = {name: value for name, value in model.items() if name != "vocab_size"}
    return values | dict(padded_vocab_size=model["vocab_size"]) | dtypes | length | dict(tokenizer)


def first_state(
    model: Mapping[str, Any],
    dtype: str,
    tokenizer: Mapping[str, Any],
    tensors: Iterable[TensorBox],
    generation: GenerationSettings | None = None,
) -> dict[str, Any]:
    """Returns ``training_state.json`` of a checkpoint that no run has written."""
    return {
        **dataclasses.asdict(Position()),
        "optimizer": None,
        "optimizer_step": 0,
        "params_dtype": dtype,
        "scheduler": None,
        "grad_scaler": None,
        "shape": shape_by_operator({tensor.name: tensor.global_shape for tensor in tensors}),
        "sample_order": {},
        "model": dict(model),
        "tokenizer": {name: tokenizer.get(f"tokenizer_{name}") for name in ("type", "model")},
        "generation": generation and dataclasses.asdict(generation),
    }


def recorded_generation(state: Mapping[str, Any]) -> GenerationSettings | None:
    """Returns the generation settings in the state of an imported model; None after training, which drops them."""
    try:
        return decode.convert(state["generation"], GenerationSettings) if state.get("generation") else None
    except ValueError as error:
        raise CheckpointError(
            f"the generation settings of the checkpoint cannot be read ({error}). Fix: import the model again",
            code="checkpoint-unreadable",
        ) from None


def _with_vocabulary(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Adds the size of the vocabulary to a model; the padded size if the tokenizer's is not recorded."""
    return {**model, "vocab_size": model.get("vocab_size") or model.get("padded_vocab_size")}


def _configured(words: Sequence[str]) -> Any:
    try:
        return config_of_words(words)
    except ConfigError as error:
        raise CheckpointError(str(error), code=code_of(error)) from None
