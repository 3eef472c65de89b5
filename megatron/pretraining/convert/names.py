"""Maps names of weights: a tensor per layer, expert and gated half here, stacked tensors in stock Megatron-LM.

Format v1 has ``decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight_w``.  In megatron-core's ``torch_dist``, this
is a chunk of ``decoder.layers.mlp.experts.experts.linear_fc1.weight``.  The first axes of that tensor are layers and
experts; its rows are the gate, then the other half.  If layers differ (``moe_layer_freq``), only experts and halves are
stacked.  The rules are those in megatron-core's ``TransformerBlock``, ``SequentialMLP`` and ``MLP``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moc.state.region import Region
from moc.store.errors import CheckpointError

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_STACKED_LAYERS = re.compile(r"decoder\.layers\.([a-z].+)")
_EXPERT = re.compile(r"(.*mlp\.experts\.experts)\.(\d+)\.(.+)")
_STACKED_EXPERTS = re.compile(r"(.*mlp\.experts\.experts)\.([a-z].+)")
_HALF = re.compile(r"(.+linear_fc1\.(?:weight|bias))_([wv])")
_FIRST_LINEAR = re.compile(r"(.+)linear_fc1\.(?:weight|bias)")
_LINEAR = re.compile(r"(decoder\.layers\..+\.linear_(?:qkv|proj|fc1|fc2)\.)weight")
_NORM = re.compile(r"(decoder\..*layernorm\.)weight")
_NORM_BEFORE_EXPERTS = re.compile(r"(decoder\.layers\..*)mlp\.linear_fc1\.layer_norm_weight")
_OUT_OF_ATTENTION = re.compile(r"(decoder\.layers\..*self_attention\.)linear_proj\.weight")
_HALVES = "wv"
_WITH_EXTRA_STATE = (
    (_LINEAR, ""),
    (_NORM, ""),
    (_NORM_BEFORE_EXPERTS, "pre_mlp_layernorm."),  # Transformer Engine's name
    (_OUT_OF_ATTENTION, "core_attention."),
)


@dataclass(frozen=True)
class StockPlace:
    """Position of a tensor of the unpartitioned model in stock Megatron-LM's weights.

    Attributes:
        key: name of the stock tensor.
        global_shape: its shape.
        region: bounds of the tensor within it.
        stacked: number of its leading axes that index layers and experts; the region has one element along each.
    """

    key: str
    global_shape: tuple[int, ...]
    region: Region
    stacked: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the unpartitioned model."""
        return self.region.shape[self.stacked :]

    def box(self, region: Region) -> Region:
        """Returns chunk bounds of the tensor in coordinates of the stock tensor."""
        ones = (1,) * self.stacked
        return Region((0,) * self.stacked + region.offset, ones + region.shape).shifted(self.region.offset)


def stacks_layers(state: Mapping[str, Any]) -> bool:
    """Returns whether megatron-core stacks a model's layers, which then have equal shapes, from its training state."""
    sizes = state["shape"] if "moe_layer_freq" in state["shape"] else state.get("model") or {}
    several = sizes.get("linear_attention_freq") or sizes.get("heterogeneous_layers_config_path")
    return sizes.get("moe_layer_freq", 1) == 1 and not several


def stock_places(shapes: Mapping[str, tuple[int, ...]], stacked: bool) -> dict[str, StockPlace]:
    """Returns the stock position of every tensor of a model, given shapes by name.

    Raises:
        CheckpointError: layers or experts are missing, or differ although they must be equal.
    """
    found = {name: _stock_name(name, stacked) for name in shapes}
    counts = {"layer": 0, "expert": 0}  # stacked layers are equal, and have the same number of experts
    for _, axes, _ in found.values():
        counts |= {axis: max(counts[axis], index + 1) for axis, index in axes.items()}
    places = {}
    for name, (key, axes, half) in found.items():
        shape = shapes[name]
        widened = shape if half is None else (2 * shape[0], *shape[1:])
        whole = (*(counts[axis] for axis in axes), *widened)
        offset = (*axes.values(), *((half or 0) * n if i == 0 else 0 for i, n in enumerate(shape)))
        places[name] = StockPlace(key, whole, Region(offset, (1,) * len(axes) + shape), len(axes))
    _check(places)
    return places


def unpartitioned_places(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StockPlace]:
    """Inverts :func:`stock_places`: returns unpartitioned tensors by name, given stock shapes by key.

    A layer is gated if its first matrix has twice as many rows as the second has columns.

    Raises:
        CheckpointError: a layer has only one of its two matrices.
    """
    places = {}
    for key, shape in shapes.items():
        stack = _stacked_axes(key)
        halves = 2 if _is_gated(key, shapes) else 1
        rest = shape[stack:]
        part = (rest[0] // halves, *rest[1:]) if halves > 1 else rest
        for axes in itertools.product(*map(range, shape[:stack])):
            for half in range(halves):
                offset = (*axes, *(half * n if i == 0 else 0 for i, n in enumerate(part)))
                name = _unpartitioned_name(key, axes) + (f"_{_HALVES[half]}" if halves > 1 else "")
                places[name] = StockPlace(key, shape, Region(offset, (1,) * stack + part), stack)
    return places


def extra_states(places: Mapping[str, StockPlace]) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Yields (key, stacked shape, offset) of each ``_extra_state`` that modules save with weights.

    They are empty without fp8, but a stock reader requires one from each of its modules: always from linear layers, and
    from norms and the inner attention if they are Transformer Engine's.  Superfluous ones are accepted.
    """
    modules = {(place.key, place.region.offset[: place.stacked]): place for place in places.values()}
    for (_, offset), place in modules.items():  # both halves of a gated layer belong to one module
        stack = place.global_shape[: len(offset)]
        for pattern, module in _WITH_EXTRA_STATE:
            if found := pattern.fullmatch(place.key):
                yield f"{found[1]}{module}_extra_state", stack or (1,), offset or (0,)


def _stock_name(name: str, stacked: bool) -> tuple[str, dict[str, int], int | None]:
    """Returns the key of the stock tensor, the indices on its stacked axes in order, and the half."""
    axes, half = {}, None
    if stacked and (layer := _LAYER.fullmatch(name)):
        name, axes["layer"] = f"decoder.layers.{layer[2]}", int(layer[1])
    if expert := _EXPERT.fullmatch(name):
        name, axes["expert"] = f"{expert[1]}.{expert[3]}", int(expert[2])
    if gate := _HALF.fullmatch(name):
        name, half = gate[1], _HALVES.index(gate[2])
    return name, axes, half


def _unpartitioned_name(key: str, axes: tuple[int, ...]) -> str:
    if layers := _STACKED_LAYERS.fullmatch(key):
        key, axes = f"decoder.layers.{axes[0]}.{layers[1]}", axes[1:]
    if experts := _STACKED_EXPERTS.fullmatch(key):
        key = f"{experts[1]}.{axes[0]}.{experts[2]}"
    return key


def _stacked_axes(key: str) -> int:
    return bool(_STACKED_LAYERS.fullmatch(key)) + bool(_STACKED_EXPERTS.fullmatch(key))


def _is_gated(key: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    first = _FIRST_LINEAR.fullmatch(key)
    if not first:
        return False
    pair = [f"{first[1]}linear_fc{number}.weight" for number in (1, 2)]
    if missing := [name for name in pair if name not in shapes]:
        raise CheckpointError(
            f"{key} is there but {missing[0]} is not: the model is incomplete. Fix: convert another checkpoint with "
            "--iteration",
            code="checkpoint-incomplete",
        )
    return shapes[pair[0]][-2] == 2 * shapes[pair[1]][-1]


def _check(places: Mapping[str, StockPlace]) -> None:
    """Checks that chunks of one shape fill every stock tensor exactly; distinct names have distinct chunks."""
    filled, shapes = defaultdict(int), defaultdict(set)
    for place in places.values():
        filled[place.key] += place.region.numel
        shapes[place.key].add((place.global_shape, place.region.shape))
    for key, numel in filled.items():
        size = max(math.prod(whole) for whole, _ in shapes[key])
        if len(shapes[key]) > 1 or numel != size:
            raise CheckpointError(
                f"the parts of {key} make up {numel:,} of {size:,} elements: layers or experts are missing or differ. "
                "Fix: list what is there with tools/inspect_checkpoint.py, and convert a checkpoint that has all "
                "parts",
                code="checkpoint-incomplete",
            )
