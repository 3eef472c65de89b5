"""Reads and writes megatron-core's ``torch_dist`` tensor by tensor, in one process without a process group.

The format is torch's distributed checkpoint (``torch.distributed.checkpoint``: ``.metadata`` and ``*.distcp``) with
megatron-core's ``metadata.json`` and ``common.pt``.  Only the readers and writers of torch and megatron-core access the
bytes; this module makes the plans, which determine the order of reads and writes.

Names of weights differ: the unpartitioned model has a tensor per layer, expert and gated half, and stock Megatron-LM
has stacked tensors. Format v1 has ``decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight_w``. In ``torch_dist``, it
is a chunk of ``decoder.layers.mlp.experts.experts.linear_fc1.weight``. The first axes of that tensor are layers and
experts; its rows are the gate, then the other half. If layers differ (``moe_layer_freq``), only experts and halves are
stacked. The rules are those in megatron-core's ``TransformerBlock``, ``SequentialMLP`` and ``MLP``.
"""

from __future__ import annotations

import gc
import io
import itertools
import math
import os
import re
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron.pretraining.process import cpu

cpu.install()  # must precede megatron.core
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject  # noqa: E402
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME  # noqa: E402

from megatron.pretraining.checkpoint.unpickling import read_metadata, restricted_unpickling  # noqa: E402
from moc.files.safe_directory import SafeDirectory  # noqa: E402
from moc.state.operators import Region  # noqa: E402
from moc.store.errors import CheckpointError  # noqa: E402

_BACKEND = CheckpointingConfig("torch_dist", 1)
_VERSION = 3.0  # version of Megatron-LM's checkpoints: the order of queries, keys and values


@dataclass(frozen=True)
class Weight:
    """Chunk of a stock tensor to write; ``values`` returns its elements, and is called when they are written."""

    key: str
    global_shape: tuple[int, ...]
    region: Region
    dtype: torch.dtype
    values: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.region.numel * self.dtype.itemsize


class WeightsReader:
    """Reads chunks of the tensors in a ``torch_dist`` directory.

    Runs no code from it (:mod:`megatron.pretraining.checkpoint.unpickling`).

    Raises:
        CheckpointError: the directory has no ``torch_dist`` checkpoint, or torch cannot read it.
    """

    def __init__(self, directory: Path):
        self._directory, self._reader = directory, FileSystemReader(directory)
        try:
            self._metadata = read_metadata(directory)
        except FileNotFoundError:
            raise CheckpointError(
                f"{directory}/.metadata is missing, so this is no torch_dist checkpoint. Fix: convert another "
                "checkpoint with --iteration",
                code="checkpoint-unreadable",
            ) from None
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._chunks: dict[str, _Chunks] = {}

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Returns shape and dtype of every tensor by its key."""
        described = self._metadata.state_dict_metadata.items()
        return {
            key: (tuple(metadata.size), metadata.properties.dtype)
            for key, metadata in described
            if isinstance(metadata, TensorStorageMetadata)
        }

    def read(self, key: str, region: Region) -> torch.Tensor:
        """Returns the values of a chunk of a tensor; raises CheckpointError if the files do not contain all of it."""
        metadata: Any = self._metadata.state_dict_metadata[key]  # a tensor's metadata
        into = torch.empty(region.shape, dtype=metadata.properties.dtype)
        chunk = ChunkStorageMetadata(torch.Size(region.offset), torch.Size(region.shape))
        if key not in self._chunks:
            self._chunks[key] = _Chunks(metadata.chunks)
        near = replace(metadata, chunks=self._chunks[key].near(region))
        items = create_read_items_for_chunk_list(key, near, [chunk])
        filled = sum(item.lengths.numel() for item in items)
        if filled != region.numel:
            raise CheckpointError(
                f"{self._directory} holds {filled:,} of {region.numel:,} elements of a box of {key}. Fix: convert "
                "another checkpoint with --iteration",
                code="checkpoint-incomplete",
            )
        try:
            with restricted_unpickling():
                self._reader.read_data(LoadPlan(items), _TensorLoadPlanner(into)).wait()
        except (OSError, RuntimeError, AssertionError, ValueError, EOFError) as error:
            raise CheckpointError(
                f"{key} cannot be read from {self._directory} ({error}). Fix: repair the file system, or convert "
                "another checkpoint with --iteration",
                code="checkpoint-unreadable",
            ) from None
        return into


class _Chunks:
    """Index of stored chunks by position, since a tensor that stacks layers and experts has very many."""

    def __init__(self, chunks: list[ChunkStorageMetadata]):
        axes = len(chunks[0].sizes)
        self._axes = next((i for i in range(axes) if any(chunk.sizes[i] != 1 for chunk in chunks)), axes)
        self._all, self._by_position = chunks, defaultdict(list)
        for chunk in chunks:
            self._by_position[tuple(chunk.offsets[: self._axes])].append(chunk)

    def near(self, region: Region) -> list[ChunkStorageMetadata]:
        """Returns the stored chunks that may overlap a region, and possibly more."""
        if any(size != 1 for size in region.shape[: self._axes]):
            return self._all
        return self._by_position.get(region.offset[: self._axes], [])


class _TensorLoadPlanner(LoadPlanner):
    """Makes torch's reader fill one tensor."""

    def __init__(self, into: torch.Tensor):
        self._into = into

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False) -> None:
        """Does nothing."""

    def create_local_plan(self) -> LoadPlan:
        """Returns an empty plan; the reader receives its plan directly."""
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans unchanged, since there is only this process."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Returns the plan unchanged."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Does nothing; no objects are read."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Returns the part of the tensor that an item fills."""
        part = self._into
        for axis, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(axis, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Does nothing; the tensor was filled in place."""


def write_weights(
    directory: Path,
    weights: Iterable[Weight],
    extra_states: Iterable[tuple[str, tuple[int, ...], tuple[int, ...]]],
    iteration: int,
    file_bytes: int,
) -> None:
    """Writes weights as ``torch_dist``, as many small writers would; all files are on disk when this returns.

    Torch's writer keeps every tensor of a file in memory until the file is complete, so memory is bounded by
    ``file_bytes`` or the largest tensor.

    Args:
        directory: an empty directory.
        weights: chunks that together cover each tensor once.
        extra_states: empty objects of modules: key, stacked shape, and offset in it.
        iteration: the iteration in ``common.pt``.
        file_bytes: size that starts the next ``.distcp`` file.

    Raises:
        CheckpointError: values cannot be read.
        OSError: files cannot be written.
    """
    planner = _Planner()
    objects = [planner.object(ShardedObject(key, None, shape, at).unique_key) for key, shape, at in extra_states]
    plans = [SavePlan(objects)] if objects else []
    plans += [SavePlan([planner.tensor(weight) for weight in part]) for part in _files(weights, file_bytes)]
    writer = FileSystemWriter(directory, thread_count=1, per_thread_copy_ahead=0)  # no reading ahead
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(plan) for plan in plans])
    plans = writer.prepare_global_plan(plans)
    try:
        _finish(directory, writer, metadata, [writer.write_data(plan, planner).wait() for plan in plans], iteration)
    except CheckpointError:
        raise  # unreadable values
    except (OSError, RuntimeError) as error:  # torch's error for a full disk, or one with the cause as its context
        _finalize_files_of(error)
        if isinstance(error, OSError):
            raise
        reason = error.__context__ if isinstance(error.__context__, OSError) else error
        raise OSError(*(reason.args if isinstance(reason, OSError) else (0, str(reason)))) from error


def _finalize_files_of(error: BaseException | None) -> None:
    """Finalizes the file objects of torch's failed write here, so that Python 3.13's reports can be dropped."""
    report, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__context__
        gc.collect()
    finally:
        sys.unraisablehook = report


def _finish(directory: Path, writer: FileSystemWriter, metadata: Metadata, results: list, iteration: int) -> None:
    writer.finish(metadata, results)
    torch.save({"checkpoint_version": _VERSION, "iteration": iteration}, directory / COMMON_STATE_FNAME)
    save_config(_BACKEND, str(directory))
    for path in directory.iterdir():
        with open(SafeDirectory(directory).open(path.name), "rb") as file:
            os.fsync(file.fileno())


def _files(weights: Iterable[Weight], file_bytes: int) -> list[list[Weight]]:
    files, remaining_bytes = [], 0
    for weight in weights:
        if not files or weight.nbytes > remaining_bytes:
            files.append([])
            remaining_bytes = file_bytes
        files[-1].append(weight)
        remaining_bytes -= weight.nbytes
    return files


class _Planner(DefaultSavePlanner):
    """Plans chunks whose values are computed only when they are written."""

    def __init__(self):
        super().__init__(flatten_state_dict=False)
        self._values: dict[tuple[str, torch.Size], Callable[[], torch.Tensor]] = {}

    def tensor(self, weight: Weight) -> WriteItem:
        """Returns the item that writes a chunk."""
        offset, size = torch.Size(weight.region.offset), torch.Size(weight.region.shape)
        self._values[weight.key, offset] = weight.values
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offset, size),
            properties=TensorProperties(dtype=weight.dtype),
            size=torch.Size(weight.global_shape),
        )
        return WriteItem(MetadataIndex(weight.key, offset), WriteItemType.SHARD, tensor_data=data)

    def object(self, key: str) -> WriteItem:
        """Returns the item that writes an empty object."""
        return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Returns an item's values when torch's writer reaches it."""
        if write_item.type == WriteItemType.BYTE_IO:
            empty = io.BytesIO()
            torch.save([None], empty)  # as megatron-core saves a layer without extra state
            return empty
        assert write_item.index.offset is not None  # the item is a tensor's
        return self._values[write_item.index.fqn, write_item.index.offset]()


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
class StockPosition:
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

    def bounds(self, region: Region) -> Region:
        """Returns chunk bounds of the tensor in coordinates of the stock tensor."""
        ones = (1,) * self.stacked
        return Region((0,) * self.stacked + region.offset, ones + region.shape).shifted(self.region.offset)


def stacks_layers(state: Mapping[str, Any]) -> bool:
    """Returns whether megatron-core stacks a model's layers, which then have equal shapes, from its training state."""
    sizes = state["shape"] if "moe_layer_freq" in state["shape"] else state.get("model") or {}
    several = sizes.get("linear_attention_freq") or sizes.get("heterogeneous_layers_config_path")
    return sizes.get("moe_layer_freq", 1) == 1 and not several


def stock_positions(shapes: Mapping[str, tuple[int, ...]], stacked: bool) -> dict[str, StockPosition]:
    """Returns the stock position of every tensor of a model, given shapes by name.

    Raises:
        CheckpointError: layers or experts are missing, or differ although they must be equal.
    """
    stock_names = {name: _stock_name(name, stacked) for name in shapes}
    axis_sizes = {"layer": 0, "expert": 0}  # stacked layers are equal, and have the same number of experts
    for _, axes, _ in stock_names.values():
        axis_sizes |= {axis: max(axis_sizes[axis], index + 1) for axis, index in axes.items()}
    positions = {}
    for name, (key, axes, half) in stock_names.items():
        shape = shapes[name]
        widened = shape if half is None else (2 * shape[0], *shape[1:])
        global_shape = (*(axis_sizes[axis] for axis in axes), *widened)
        offset = (*axes.values(), *((half or 0) * n if i == 0 else 0 for i, n in enumerate(shape)))
        positions[name] = StockPosition(key, global_shape, Region(offset, (1,) * len(axes) + shape), len(axes))
    _check(positions)
    return positions


def unpartitioned_positions(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StockPosition]:
    """Inverts :func:`stock_positions`: returns unpartitioned tensors by name, given stock shapes by key.

    A layer is gated if its first matrix has twice as many rows as the second has columns.

    Raises:
        CheckpointError: a layer has only one of its two matrices.
    """
    positions = {}
    for key, shape in shapes.items():
        stack = bool(_STACKED_LAYERS.fullmatch(key)) + bool(_STACKED_EXPERTS.fullmatch(key))
        halves = 2 if _is_gated(key, shapes) else 1
        unstacked_shape = shape[stack:]
        part = (unstacked_shape[0] // halves, *unstacked_shape[1:]) if halves > 1 else unstacked_shape
        for axes in itertools.product(*map(range, shape[:stack])):
            for half in range(halves):
                offset = (*axes, *(half * n if i == 0 else 0 for i, n in enumerate(part)))
                name = _unpartitioned_name(key, axes) + (f"_{_HALVES[half]}" if halves > 1 else "")
                positions[name] = StockPosition(key, shape, Region(offset, (1,) * stack + part), stack)
    return positions


def extra_states(positions: Mapping[str, StockPosition]) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Yields (key, stacked shape, offset) of each ``_extra_state`` that modules save with weights.

    They are empty without fp8, but a stock reader requires one from each of its modules: always from linear layers, and
    from norms and the inner attention if they are Transformer Engine's.  Superfluous ones are accepted.
    """
    modules = {(position.key, position.region.offset[: position.stacked]): position for position in positions.values()}
    for (_, offset), position in modules.items():  # both halves of a gated layer belong to one module
        stack = position.global_shape[: len(offset)]
        for pattern, module in _WITH_EXTRA_STATE:
            if match := pattern.fullmatch(position.key):
                yield f"{match[1]}{module}_extra_state", stack or (1,), offset or (0,)


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


def _check(positions: Mapping[str, StockPosition]) -> None:
    """Checks that chunks of one shape fill every stock tensor exactly; distinct names have distinct chunks."""
    filled, shapes = defaultdict(int), defaultdict(set)
    for position in positions.values():
        filled[position.key] += position.region.numel
        shapes[position.key].add((position.global_shape, position.region.shape))
    for key, numel in filled.items():
        size = max(math.prod(global_shape) for global_shape, _ in shapes[key])
        if len(shapes[key]) > 1 or numel != size:
            raise CheckpointError(
                f"the parts of {key} make up {numel:,} of {size:,} elements: layers or experts are missing or differ. "
                "Fix: list what is there with tools/inspect_checkpoint.py, and convert a checkpoint that has all "
                "parts",
                code="checkpoint-incomplete",
            )
