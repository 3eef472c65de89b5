"""The shape of a model in plain numbers, and its operators, without a model, torch or a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moc.state.operators import Operator


@dataclass(frozen=True)
class ModelShape:
    """The dimensions that determine the parameters of each operator; widths are in elements.

    Attributes:
        expert_layers: one entry per layer: 1 with experts, 0 dense.
        hidden_size: width of the residual stream.
        ffn_hidden_size: inner width of the dense feed-forward layers.
        query_width: query heads times head width.
        key_width: key heads (equal to value heads) times head width.
        head_width: width of one head.
        vocab_size: rows of the embedding, padding included.
        positions: learned positions; 0 if positions are not learned.
        num_experts: experts in each layer with experts.
        expert_ffn_hidden_size: inner width of an expert.
        shared_ffn_hidden_size: total inner width of the shared experts of a layer; 0 for none.
        shared_gate: shared experts have a gate of one output for each token.
        gated: the feed-forward layers and experts have a gate (SwiGLU).
        linear_bias: linear layers have biases.
        qkv_bias: the QKV projection has a bias even if other linear layers have none.
        norm_bias: norms have biases (LayerNorm).
        qk_norm: queries and keys are normalised.
        qk_norm_full_width: queries and keys are normalised over all heads together, not for each head.
        tied: embedding and output layer share their weight.
    """

    expert_layers: tuple[int, ...]
    hidden_size: int
    ffn_hidden_size: int
    query_width: int
    key_width: int
    head_width: int
    vocab_size: int
    positions: int = 0
    num_experts: int = 0
    expert_ffn_hidden_size: int = 0
    shared_ffn_hidden_size: int = 0
    shared_gate: bool = False
    gated: bool = False
    linear_bias: bool = True
    qkv_bias: bool = False
    norm_bias: bool = True
    qk_norm: bool = False
    qk_norm_full_width: bool = False
    tied: bool = True


def model_operators(shape: ModelShape) -> list[Operator]:
    """Returns every operator of a model, in the order of the forward pass."""
    words, positions = shape.vocab_size * shape.hidden_size, shape.positions * shape.hidden_size
    operators = [Operator("embedding", "embedding", None, None, words + positions, unsliced=positions)]
    for layer, has_experts in enumerate(shape.expert_layers):
        operators.append(_attention(shape, layer))
        operators.append(_shared(shape, layer) if has_experts else _mlp(shape, layer, shape.ffn_hidden_size))
        if has_experts:
            router = shape.num_experts * (shape.hidden_size + shape.linear_bias)
            operators.append(Operator(f"layers.{layer}.router", "router", layer, None, router, unsliced=router))
            operators.extend(_experts(shape, layer))
    norm = _norm(shape, shape.hidden_size)
    operators.append(Operator("output", "output", None, None, norm + (0 if shape.tied else words), unsliced=norm))
    return operators


def _attention(shape: ModelShape, layer: int) -> Operator:
    into = shape.query_width + 2 * shape.key_width
    sliced = shape.hidden_size * (into + shape.query_width) + into * (shape.linear_bias or shape.qkv_bias)
    unsliced = _norm(shape, shape.hidden_size) + shape.hidden_size * shape.linear_bias
    if shape.qk_norm:
        widths = (shape.query_width, shape.key_width) if shape.qk_norm_full_width else 2 * (shape.head_width,)
        unsliced += sum(_norm(shape, width) for width in widths)
    return Operator(f"layers.{layer}.attention", "attention", layer, None, sliced + unsliced, unsliced)


def _shared(shape: ModelShape, layer: int) -> Operator:
    return _mlp(shape, layer, shape.shared_ffn_hidden_size, shape.hidden_size * shape.shared_gate)


def _mlp(shape: ModelShape, layer: int, width: int, gate: int = 0) -> Operator:
    sliced, unsliced = _feed_forward(shape, width) if width else (0, 0)
    unsliced += _norm(shape, shape.hidden_size) + gate
    return Operator(f"layers.{layer}.mlp", "mlp", layer, None, sliced + unsliced, unsliced)


def _experts(shape: ModelShape, layer: int) -> Iterator[Operator]:
    sliced, unsliced = _feed_forward(shape, shape.expert_ffn_hidden_size)
    for expert in range(shape.num_experts):
        yield Operator(f"layers.{layer}.expert.{expert}", "expert", layer, expert, sliced + unsliced, unsliced)


def _feed_forward(shape: ModelShape, width: int) -> tuple[int, int]:
    """Returns the parameters of a feed-forward layer: sliced by tensor parallelism, and unsliced."""
    into = (2 if shape.gated else 1) * width
    return shape.hidden_size * (into + width) + into * shape.linear_bias, shape.hidden_size * shape.linear_bias


def _norm(shape: ModelShape, width: int) -> int:
    return width * (2 if shape.norm_bias else 1)
