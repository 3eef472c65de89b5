"""Converts a checkpoint's contents to transformers' tensors and back; values are read on demand.

Every tensor of one side consists of rows of tensors of the other, times at most a power of two. So a round trip is
bit-exact, and any chunk can be read separately.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron.pretraining.convert.contents import COMPUTE, ConvertedState, Facts, complete_bounds
from megatron.pretraining.convert.hugging_face.family import FULL_WIDTH, Described, Family, described_model
from megatron.pretraining.convert.hugging_face.files import TensorLocation, TensorSpec
from moc.inspect.coverage import PARAM, operator_or_other
from moc.state.operators import Region, is_module_state
from moc.store.errors import CheckpointError
from moc.store.shard_file import TensorBox

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_NORM, _NORM_OF_EXPERTS = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
_DERIVED = re.compile(r"(?:.+\.)?rotary_emb\.inv_freq")  # in files of old versions; a function of the configuration
_MAX_LISTED = 3  # maximum names in a message


@dataclass(frozen=True)
class Rows:
    """Equal rows: ``count`` rows from row ``ours`` of this program's tensor, and from ``theirs`` in transformers."""

    ours: int
    theirs: int
    count: int


@dataclass(frozen=True)
class Pair:
    """Common values of a tensor of this program and one of transformers.

    Attributes:
        ours: name in the unpartitioned model.
        theirs: name in transformers.
        our_shape: shape here; embedding and output layer may have more rows (padding).
        their_shape: shape in transformers.
        rows: equal rows.
        factor: a power of two; transformers' values are this program's times this factor.
    """

    ours: str
    theirs: str
    our_shape: Shape
    their_shape: Shape
    rows: tuple[Rows, ...]
    factor: float = 1.0


@dataclass(frozen=True)
class NameMap:
    """All tensors of a model.

    Attributes:
        pairs: in the order of the forward pass.
        zeros: shapes by name of transformers' tensors that are all zeros, since the model lacks them.
    """

    pairs: tuple[Pair, ...]
    zeros: Shapes = field(default_factory=dict)

    def of_ours(self) -> dict[str, list[Pair]]:
        """Returns the pairs by this program's name."""
        pairs_of: dict[str, list[Pair]] = {}
        for pair in self.pairs:
            pairs_of.setdefault(pair.ours, []).append(pair)
        return pairs_of

    def their_shapes(self) -> dict[str, Shape]:
        """Returns the shapes of all transformers' tensors by name, in the order of the forward pass."""
        return {pair.theirs: pair.their_shape for pair in self.pairs} | dict(self.zeros)

    def fitted(self, shapes: Shapes) -> NameMap:
        """Returns this map with the checkpoint's names; the norm before experts has two alternative names.

        Raises:
            CheckpointError: one of the checkpoint's tensors is missing, superfluous, or has another shape.
        """
        pairs = tuple(replace(pair, ours=_existing_name(pair.ours, shapes)) for pair in self.pairs)
        expected = {pair.ours: pair.our_shape for pair in pairs}
        _check_names(expected, shapes, "the checkpoint", "the flags of its model")
        for name, shape in expected.items():
            stored_shape = shapes[name]
            padded = name in (_EMBEDDING, _OUTPUT) and stored_shape[1:] == shape[1:] and stored_shape[0] >= shape[0]
            if stored_shape != shape and not padded:
                raise CheckpointError(
                    f"{name} has the shape {list(stored_shape)} in the checkpoint, and {list(shape)} by the flags of "
                    "its model. Fix: give the flags that the model was trained with",
                    code="tensor-shape-wrong",
                )
        return replace(self, pairs=pairs)

    def check_theirs(self, shapes: Shapes) -> None:
        """Raises CheckpointError if one of transformers' tensors is missing, superfluous, or has another shape."""
        stored_shapes = {name: shape for name, shape in shapes.items() if not _DERIVED.fullmatch(name)}
        expected = self.their_shapes()
        _check_names(expected, stored_shapes, "the directory", "config.json")
        for name, shape in expected.items():
            if stored_shapes[name] != shape:
                raise CheckpointError(
                    f"{name} has the shape {list(stored_shapes[name])} in the directory, and {list(shape)} by "
                    "config.json. Fix: correct config.json, or download the files again",
                    code="tensor-shape-wrong",
                )


def name_map(model: Mapping[str, Any], family: Family) -> NameMap:
    """Returns the tensors of a model, here and in a family; raises CheckpointError if the model is invalid."""
    described = described_model(model)
    pairs, zeros = _pairs(described, family), {}
    for layer in (layer for layer, experts in enumerate(described.expert_layers) if experts):
        zeros |= _zeros(described, family, f"model.layers.{layer}.{family.moe}", family.shared_width(model))
    return NameMap(tuple(pairs), zeros)


def _pairs(model: Described, family: Family) -> Iterator[Pair]:
    words = (model.vocab_size, model.hidden_size)
    yield _equal_pair(_EMBEDDING, "model.embed_tokens.weight", words)
    for layer, experts in enumerate(model.expert_layers):
        for pair in (*_attention(model), *(_experts(model, family) if experts else _dense(model))):
            yield replace(
                pair, ours=f"decoder.layers.{layer}.{pair.ours}", theirs=f"model.layers.{layer}.{pair.theirs}"
            )
    yield _equal_pair("decoder.final_layernorm.weight", "model.norm.weight", words[1:])
    if model.untie_embeddings_and_output_weights:
        yield _equal_pair(_OUTPUT, "lm_head.weight", words)


def _attention(model: Described) -> Iterator[Pair]:
    hidden, width = model.hidden_size, model.kv_channels
    heads, groups = model.num_attention_heads, model.num_query_groups
    yield _equal_pair("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", (hidden,))
    yield from _queries_keys_values("weight", heads, groups, width, (hidden,))
    if model.add_qkv_bias:
        yield from _queries_keys_values("bias", heads, groups, width, ())
    if model.qk_layernorm:
        full = model.spec == FULL_WIDTH
        for kind, number in (("q", heads), ("k", groups)):
            shape = (number * width if full else width,)
            yield _equal_pair(f"self_attention.{kind}_layernorm.weight", f"self_attn.{kind}_norm.weight", shape)
    yield _equal_pair("self_attention.linear_proj.weight", "self_attn.o_proj.weight", (hidden, heads * width))
    yield _equal_pair(_NORM, "post_attention_layernorm.weight", (hidden,))


def _queries_keys_values(kind: str, heads: int, groups: int, width: int, trailing: Shape) -> Iterator[Pair]:
    """Yields the pairs of the joint matrix, whose rows are, for each group, its query heads, key and value."""
    ratio = heads // groups
    stride = (ratio + 2) * width
    for which, first, count in (("q", 0, ratio), ("k", ratio, 1), ("v", ratio + 1, 1)):
        rows = tuple(Rows(g * stride + first * width, g * count * width, count * width) for g in range(groups))
        ours, theirs = f"self_attention.linear_qkv.{kind}", f"self_attn.{which}_proj.{kind}"
        yield Pair(ours, theirs, (groups * stride, *trailing), (groups * count * width, *trailing), rows)


def _dense(model: Described) -> Iterator[Pair]:
    yield from _gated("mlp", "mlp", ("gate_proj", "up_proj", "down_proj"), model, model.ffn_hidden_size)


def _experts(model: Described, family: Family) -> Iterator[Pair]:
    hidden, experts = model.hidden_size, model.num_experts
    assert experts is not None  # some layers have experts
    yield _equal_pair("mlp.router.weight", f"{family.moe}.gate.weight", (experts, hidden))
    if model.moe_router_enable_expert_bias:
        yield _equal_pair("mlp.router.expert_bias", f"{family.moe}.gate.e_score_correction_bias", (experts,))
    names = (family.gate, family.up, family.down)
    for expert in range(experts):
        ours, theirs = f"mlp.experts.experts.{expert}", f"{family.moe}.experts.{expert}"
        yield from _gated(ours, theirs, names, model, model.moe_ffn_hidden_size or model.ffn_hidden_size)
    if model.shared and family.shared:
        doubled = family.shared_gate and not model.moe_shared_expert_gate
        shared = f"{family.moe}.{family.shared}"
        factor = family.ungated_down if doubled else 1.0
        yield from _gated("mlp.shared_experts", shared, _shared_names(family), model, model.shared, factor)
        if model.moe_shared_expert_gate:
            yield _equal_pair("mlp.shared_experts.gate_weight", f"{shared}_gate.weight", (1, hidden))


def _shared_names(family: Family) -> tuple[str, str, str]:
    return family.gate, family.up, family.down


def _gated(
    ours: str, theirs: str, names: tuple[str, str, str], model: Described, width: int | None, factor: float = 1.0
) -> Iterator[Pair]:
    hidden = model.hidden_size
    assert width is not None
    gate, up, down = (f"{theirs}.{name}.weight" for name in names)
    yield _equal_pair(f"{ours}.linear_fc1.weight_w", gate, (width, hidden))
    yield _equal_pair(f"{ours}.linear_fc1.weight_v", up, (width, hidden))
    yield replace(_equal_pair(f"{ours}.linear_fc2.weight", down, (hidden, width)), factor=factor)


def _zeros(model: Described, family: Family, moe: str, shared: int) -> Iterator[tuple[str, Shape]]:
    """Yields the family's tensors of a layer with experts that the model lacks."""
    hidden = model.hidden_size
    if family.expert_bias and not model.moe_router_enable_expert_bias:
        yield f"{moe}.gate.e_score_correction_bias", (model.num_experts or 0,)
    if not shared:
        return
    if not model.shared:
        for name, shape in zip(
            _shared_names(family), ((shared, hidden), (shared, hidden), (hidden, shared)), strict=True
        ):
            yield f"{moe}.{family.shared}.{name}.weight", shape
    if family.shared_gate and not (model.shared and model.moe_shared_expert_gate):
        yield f"{moe}.{family.shared}_gate.weight", (1, hidden)


def _equal_pair(ours: str, theirs: str, shape: Shape) -> Pair:
    return Pair(ours, theirs, shape, shape, (Rows(0, 0, shape[0]),))


def _existing_name(name: str, stored: Shapes) -> str:
    """Returns the existing name: local layers and Transformer Engine name the norm before experts differently."""
    alternative = name.removesuffix(_NORM) + _NORM_OF_EXPERTS
    return alternative if name.endswith(_NORM) and name not in stored and alternative in stored else name


def _check_names(expected: Shapes, stored: Shapes, where: str, by: str) -> None:
    if missing := [name for name in expected if name not in stored]:
        raise CheckpointError(
            f"{_join_names(missing)} not in {where}, and must be by {by}. Fix: convert a complete model",
            code="tensor-missing",
        )
    if unexpected := [name for name in stored if name not in expected]:
        raise CheckpointError(
            f"{_join_names(unexpected)} in {where}, and must not be by {by}. Fix: convert a model without them, or "
            "correct its description",
            code="tensor-unexpected",
        )


def _join_names(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_LISTED])
    remainder = f" and {len(names) - _MAX_LISTED} others" if len(names) > _MAX_LISTED else ""
    return f"{shown}{remainder} {'is' if len(names) == 1 else 'are'}"


_BLOCK = 64 << 20
_MAX_CACHED_BYTES = 1 << 30  # bytes of a tensor that is cached for its later rows


class Exported:
    """Model of this program as tensors of transformers.

    Args:
        weights: the compute weights.
        names: the tensors of both sides.
        dtype: dtype of the result; None keeps each dtype.  Router biases stay fp32.

    Raises:
        CheckpointError: one of this program's tensors is missing, superfluous, or has another shape.
    """

    def __init__(self, weights: ConvertedState, names: NameMap, dtype: torch.dtype | None):
        self._weights = _CachedRows(weights)
        ours = {entry.name: entry for entry in weights.tensors}
        self.names = names.fitted({name: entry.global_shape for name, entry in ours.items()})
        self._pairs = {pair.theirs: pair for pair in self.names.pairs}
        self._dtypes = {pair.theirs: _dtype(pair.ours, ours[pair.ours].dtype, dtype) for pair in self.names.pairs}
        common_dtype = dtype or most_common(self._dtypes.values())
        self._dtypes |= {name: _dtype(name, common_dtype, None) for name in self.names.zeros}
        self.tensors = [TensorSpec(name, shape, self._dtypes[name]) for name, shape in _in_order(self.names).items()]
        self.dtype = common_dtype

    def blocks(self, tensor: TensorSpec) -> Iterator[torch.Tensor]:
        """Yields the values of one of transformers' tensors, in parts, by rows."""
        step, rows = max(1, _BLOCK // max(1, tensor.row_bytes)), tensor.shape[0]
        for first in range(0, rows, step):
            yield self.rows(tensor, first, min(step, rows - first))

    def rows(self, tensor: TensorSpec, first: int, count: int) -> torch.Tensor:
        """Returns some rows of one of transformers' tensors.

        Raises:
            CheckpointError: values cannot be read, or become infinite.
        """
        if tensor.name not in self._pairs:
            return torch.zeros(count, *tensor.shape[1:], dtype=tensor.dtype)
        pair = self._pairs[tensor.name]
        spans = _overlaps(((r.theirs, r.ours, r.count) for r in pair.rows), first, count)
        parts = [self._weights.rows(pair.ours, ours, number) for ours, number in spans]
        values = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(tensor.dtype)
        if pair.factor == 1:
            return values
        scaled = values * pair.factor
        if not torch.equal(scaled / pair.factor, values):
            raise CheckpointError(
                f"{tensor.name}, {pair.factor:g} times {pair.ours}, is out of range. Fix: pass --dtype bf16",
                code="dtype-too-narrow",
            )
        return scaled


class Imported(ConvertedState):
    """Tensors of transformers as a model of this program, without optimizer state.

    Args:
        stored: the tensors, by name.
        names: the tensors of both sides.
        dtype: dtype of the result; None keeps each dtype.  Router biases become fp32.
        state: as in ``training_state.json``.

    Raises:
        CheckpointError: one of transformers' tensors is missing, superfluous, or has another shape or dtype.
    """

    def __init__(self, stored: Mapping[str, TensorLocation], names: NameMap, dtype: torch.dtype | None, state: dict):
        names.check_theirs({name: location.tensor.shape for name, location in stored.items()})
        self._stored, self._pairs = stored, names.of_ours()
        self.tensors = [self._entry(name, pairs, dtype) for name, pairs in self._pairs.items()]
        self._dtypes = {entry.name: entry.dtype for entry in self.tensors}
        self.operators = {operator_or_other(name): (COMPUTE, None) for name in self._pairs}
        self.facts = Facts(0, "full", {}, state, 1)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of most weights."""
        return most_common(self._dtypes.values())

    def with_state(self, state: dict) -> Imported:
        """Sets the state other than tensors, and returns itself."""
        self.facts = replace(self.facts, state=state)
        return self

    def read(self, name: str, slot: str, region: Region) -> torch.Tensor:
        """Reads a chunk of a weight."""
        parts: dict[int, torch.Tensor] = {}
        for pair in self._pairs[name]:
            for r in pair.rows:
                for theirs, number in _overlaps([(r.ours, r.theirs, r.count)], region.offset[0], region.shape[0]):
                    values = self._stored[pair.theirs].rows(theirs, number).to(self._dtypes[name])
                    parts[r.ours] = values if pair.factor == 1 else values / pair.factor
        values = torch.cat([parts[start] for start in sorted(parts)])
        return values[(slice(None), *region.slices()[1:])].contiguous()

    def _entry(self, name: str, pairs: list[Pair], dtype: torch.dtype | None) -> TensorBox:
        dtypes = {self._stored[pair.theirs].tensor.dtype for pair in pairs}
        if len(dtypes) > 1 and dtype is None:
            raise CheckpointError(
                f"{' and '.join(p.theirs for p in pairs)} have several dtypes. Fix: pass --dtype",
                code="dtype-missing",
            )
        shape = pairs[0].our_shape
        return TensorBox(name, PARAM, shape, complete_bounds(shape), _dtype(name, dtypes.pop(), dtype))


class _CachedRows:
    """Reads rows of weights; caches the last tensor unless it is huge."""

    def __init__(self, weights: ConvertedState):
        self._weights = weights
        self._entries = {entry.name: entry for entry in weights.tensors}
        self._name, self._values = "", torch.empty(0)

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        """Returns rows of a weight."""
        entry = self._entries[name]
        if entry.nbytes > _MAX_CACHED_BYTES:
            offset = (first, *(0 for _ in entry.global_shape[1:]))
            return self._weights.read(name, entry.slot, Region(offset, (count, *entry.global_shape[1:])))
        if name != self._name:
            self._name, self._values = name, self._weights.read(name, entry.slot, entry.region)
        return self._values[first : first + count]


def _overlaps(spans: Iterable[tuple[int, int, int]], first: int, count: int) -> Iterator[tuple[int, int]]:
    """Yields the overlaps of spans (start, other start, length) with a range, as (other start, length)."""
    for start, other_start, length in spans:
        low, high = max(first, start), min(first + count, start + length)
        if low < high:
            yield other_start + low - start, high - low


def most_common(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Returns the dtype of most tensors."""
    return Counter(dtypes).most_common(1)[0][0]


def _dtype(name: str, stored: torch.dtype, requested: torch.dtype | None) -> torch.dtype:
    if is_module_state(name) or name.endswith("e_score_correction_bias"):
        return torch.float32
    return requested or stored


def _in_order(names: NameMap) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of transformers' tensors by name, layer by layer, so that a file has few layers."""
    shapes, layers = names.their_shapes(), {}
    for name, shape in shapes.items():
        parts = name.split(".")
        position = int(parts[2]) + 1 if parts[1] == "layers" else 0 if "embed" in name else len(shapes)
        layers.setdefault(position, {})[name] = shape
    return {name: shape for position in sorted(layers) for name, shape in layers[position].items()}
