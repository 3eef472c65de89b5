"""Converts a checkpoint's contents to transformers' tensors and back; values are read on demand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from megatron.pretraining.convert.contents import COMPUTE, ConvertedState, Facts, whole_of
from megatron.pretraining.convert.hugging_face.files import StoredTensor, Tensor
from megatron.pretraining.convert.hugging_face.names import NameMap, Pair
from moc.inspect.coverage import PARAM, operator_or_other
from moc.state.operators import is_module_state
from moc.state.region import Region
from moc.store.errors import CheckpointError
from moc.store.shard_file import TensorBox

_BLOCK = 64 << 20
_HELD = 1 << 30  # bytes of a tensor that is cached for its later rows


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
        self._weights = _Held(weights)
        ours = {entry.name: entry for entry in weights.tensors}
        self.names = names.fitted({name: entry.global_shape for name, entry in ours.items()})
        self._pairs = {pair.theirs: pair for pair in self.names.pairs}
        self._dtypes = {pair.theirs: _dtype(pair.ours, ours[pair.ours].dtype, dtype) for pair in self.names.pairs}
        most = dtype or most_common(self._dtypes.values())
        self._dtypes |= {name: _dtype(name, most, None) for name in self.names.zeros}
        self.tensors = [Tensor(name, shape, self._dtypes[name]) for name, shape in _in_order(self.names).items()]
        self.dtype = most

    def blocks(self, tensor: Tensor) -> Iterator[torch.Tensor]:
        """Yields the values of one of transformers' tensors, in parts, by rows."""
        step, rows = max(1, _BLOCK // max(1, tensor.row_bytes)), tensor.shape[0]
        for first in range(0, rows, step):
            yield self.rows(tensor, first, min(step, rows - first))

    def rows(self, tensor: Tensor, first: int, count: int) -> torch.Tensor:
        """Returns some rows of one of transformers' tensors.

        Raises:
            CheckpointError: values cannot be read, or become infinite.
        """
        if tensor.name not in self._pairs:
            return torch.zeros(count, *tensor.shape[1:], dtype=tensor.dtype)
        pair = self._pairs[tensor.name]
        spans = _common(((r.theirs, r.ours, r.count) for r in pair.rows), first, count)
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

    def __init__(self, stored: Mapping[str, StoredTensor], names: NameMap, dtype: torch.dtype | None, state: dict):
        names.check_theirs({name: one.tensor.shape for name, one in stored.items()})
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
                for theirs, number in _common([(r.ours, r.theirs, r.count)], region.offset[0], region.shape[0]):
                    values = self._stored[pair.theirs].rows(theirs, number).to(self._dtypes[name])
                    parts[r.ours] = values if pair.factor == 1 else values / pair.factor
        whole = torch.cat([parts[start] for start in sorted(parts)])
        return whole[(slice(None), *region.slices()[1:])].contiguous()

    def _entry(self, name: str, pairs: list[Pair], dtype: torch.dtype | None) -> TensorBox:
        there = {self._stored[pair.theirs].tensor.dtype for pair in pairs}
        if len(there) > 1 and dtype is None:
            raise CheckpointError(
                f"{' and '.join(p.theirs for p in pairs)} have several dtypes. Fix: pass --dtype",
                code="dtype-missing",
            )
        shape = pairs[0].our_shape
        return TensorBox(name, PARAM, shape, whole_of(shape), _dtype(name, there.pop(), dtype))


class _Held:
    """Reads rows of weights; caches the last tensor unless it is huge."""

    def __init__(self, weights: ConvertedState):
        self._weights = weights
        self._entries = {entry.name: entry for entry in weights.tensors}
        self._name, self._values = "", torch.empty(0)

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        """Returns rows of a weight."""
        entry = self._entries[name]
        if entry.nbytes > _HELD:
            offset = (first, *(0 for _ in entry.global_shape[1:]))
            return self._weights.read(name, entry.slot, Region(offset, (count, *entry.global_shape[1:])))
        if name != self._name:
            self._name, self._values = name, self._weights.read(name, entry.slot, entry.region)
        return self._values[first : first + count]


def _common(spans: Iterable[tuple[int, int, int]], first: int, count: int) -> Iterator[tuple[int, int]]:
    """Yields the overlaps of spans (start, other start, length) with a range, as (other start, length)."""
    for start, elsewhere, length in spans:
        low, high = max(first, start), min(first + count, start + length)
        if low < high:
            yield elsewhere + low - start, high - low


def most_common(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Returns the dtype of most tensors."""
    return Counter(dtypes).most_common(1)[0][0]


def _dtype(name: str, there: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    if is_module_state(name) or name.endswith("e_score_correction_bias"):
        return torch.float32
    return wanted or there


def _in_order(names: NameMap) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of transformers' tensors by name, layer by layer, so that a file has few layers."""
    shapes, layers = names.their_shapes(), {}
    for name, shape in shapes.items():
        parts = name.split(".")
        place = int(parts[2]) + 1 if parts[1] == "layers" else 0 if "embed" in name else len(shapes)
        layers.setdefault(place, {})[name] = shape
    return {name: shape for place in sorted(layers) for name, shape in layers[place].items()}
