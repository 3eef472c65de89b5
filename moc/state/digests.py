"""Digests of the training state: sums over elements that are equal in every layout.

The digest of an optimizer-state key of an operator is the sum, modulo 2^64, over all elements of its tensors in the
unpartitioned model.  Element ``i`` of a tensor contributes its bit pattern in lane ``i % lanes`` of a 64-bit word, with
``lanes = 8 / itemsize``, times ``2 * (i // lanes) + 1``, times an odd number derived from the tensor's name.  So

* the digests of tensor chunks add up to the digest of the tensor, however it is partitioned;
* each change of a single bit changes the digest, because all factors are odd;
* exchanged elements and exchanged tensors change it, too.

Cost: one read of the state.  On a CPU, one core processes 13 GB/s.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import xxhash

from moc.state.interface import TrainingState
from moc.state.operators import MODULE_STATE, Detail, Fragment, Operator, Region

Key = tuple[str, str]
"""Operator and optimizer-state key.  Tensors whose shape depends on the layout have keys with their size."""

_WORD = 8
_MOST = {"cpu": 1 << 15}  # words per product: temporary values stay in the cache
_MOST_OF_DEVICE = 1 << 22  # 32 MB of temporary values; smaller products would take longer to launch than to compute
MODULE = "module"
"""Optimizer-state key of the state of user modules."""
MASK = (1 << 64) - 1
"""Digests are integers modulo 2^64."""


@dataclass(frozen=True, eq=False)
class ChunkDigest:
    """Function from a tensor chunk to its share of the digest.

    Attributes:
        values: live values, flattened.
        run: number of elements that are consecutive in the unpartitioned tensor.
        starts: index of the first element of each run in the unpartitioned tensor, int64 on the CPU.
        factor: odd factor of the tensor, as a signed 64-bit integer.
        is_aligned: whether every run consists of complete words of the unpartitioned tensor.
    """

    values: torch.Tensor
    run: int
    starts: torch.Tensor
    factor: int
    is_aligned: bool

    @classmethod
    def of(cls, fragment: Fragment) -> ChunkDigest:
        """Returns the digest function of a tensor chunk of this rank."""
        return cls.of_values(fragment.name, fragment.global_shape, fragment.region, fragment.view)

    @classmethod
    def of_values(cls, name: str, global_shape: tuple[int, ...], region: Region, values: torch.Tensor) -> ChunkDigest:
        """Returns the digest function of a chunk of the tensor ``name`` with the shape ``global_shape``."""
        shape, full_shape, offset = region.shape, global_shape, region.offset
        axis = len(shape)  # the axes from here on are complete
        while axis and shape[axis - 1] == full_shape[axis - 1]:
            axis -= 1
        axis = max(axis - 1, 0)  # the last partial axis is consecutive, too
        strides = [math.prod(full_shape[axis + 1 :]) for axis in range(len(full_shape))]
        starts = torch.tensor([sum(o * s for o, s in zip(offset, strides, strict=True))])
        for count, stride in zip(shape[:axis], strides[:axis], strict=True):
            starts = (starts[:, None] + torch.arange(count) * stride).reshape(-1)
        factor = _signed(xxhash.xxh3_64_intdigest(name.encode()) | 1)
        run, lanes = math.prod(shape[axis:]), _WORD // values.itemsize
        is_aligned = not run % lanes and not bool((starts % lanes).any())
        return cls(values.detach().view(-1), run, starts, factor, is_aligned)

    @cached_property
    def first_word(self) -> int:
        """Index of the first word in the unpartitioned tensor."""
        return int(self.starts[0]) * self.values.itemsize // _WORD

    @property
    def is_run(self) -> bool:
        """Whether the values are consecutive complete words of the unpartitioned tensor, and of their memory."""
        values, lanes = self.values, _WORD // self.values.itemsize
        is_whole = self.is_aligned and len(self.starts) == 1 and not values.storage_offset() % lanes
        return is_whole and bool(values.numel())

    @cached_property
    def _starts_on_device(self) -> torch.Tensor:  # copied once, since each copy waits for the device
        return self.starts.to(self.values.device)

    def __call__(self) -> torch.Tensor:
        """Returns the digest of the current values: an int64 scalar on their device."""
        values, lanes = self.values, _WORD // self.values.itemsize
        if not values.numel():
            return torch.zeros((), dtype=torch.int64, device=values.device)
        if not self.is_aligned:
            return self._by_element(lanes) * self.factor
        if values.storage_offset() % lanes:  # memory that does not begin with a complete word
            values = values.clone()
        words = values.view(torch.int64)
        if len(self.starts) == 1:
            return _consecutive(words, self.first_word) * self.factor
        rows = words.view(len(self.starts), -1)
        weights = 2 * (self._starts_on_device // lanes) + 1
        columns = 2 * torch.arange(rows.shape[1], device=words.device)
        return (_dot(rows.sum(1), weights) + _dot(rows.sum(0), columns)) * self.factor

    def _by_element(self, lanes: int) -> torch.Tensor:
        size, total = self.values.itemsize, 0
        rows = self.values.view(_INTEGERS[size]).view(len(self.starts), -1)
        runs_per_part = max(1, _most_words(rows.device) // self.run)
        starts_of_parts = self._starts_on_device.split(runs_per_part)
        for starts, part in zip(starts_of_parts, rows.split(runs_per_part), strict=True):
            index = starts[:, None] + torch.arange(self.run, device=part.device)
            bits = part.long() & ((1 << 8 * size) - 1)
            total = total + ((bits << (index % lanes * 8 * size)) * (2 * (index // lanes) + 1)).sum()
        return torch.as_tensor(total)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _most_words(device: torch.device) -> int:
    return _MOST.get(device.type, _MOST_OF_DEVICE)


@functools.cache
def _odd_numbers(device: torch.device) -> torch.Tensor:
    return 2 * torch.arange(_most_words(device), device=device) + 1


def _consecutive(words: torch.Tensor, first: int) -> torch.Tensor:
    """Returns the weighted sum of words; ``first`` is the index of the first one."""
    odd, most, total = _odd_numbers(words.device), _most_words(words.device), None
    for start in range(0, len(words), most):
        part, before = words[start : start + most], 2 * (first + start)
        added = _dot(part, odd[: len(part)])
        if before:
            added = added + part.sum() * before
        total = added if total is None else total + added
    assert total is not None  # there are values
    return total


def _dot(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.dot(first, second) if first.device.type == "cpu" else (first * second).sum()  # CUDA has no integer dot


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


@dataclass(frozen=True, eq=False)
class Block:
    """Words of several tensor chunks on a device: to launch sums for each chunk would take longer than to compute them.

    Word p of a block has the weight 2 p + 1; in its tensor, it has this weight plus the shift of its piece.  The sum of
    a piece is the difference of two cumulative sums, which is exact modulo 2^64.

    Attributes:
        pieces: words of each piece, int64, in live memory.
        ends: index of the last word of each piece in the block, int64 of shape [pieces]; as all others.
        shifts: as above.
        factors: odd factors of the tensors.
        targets: indices of the digests that the pieces are part of.
    """

    pieces: Sequence[torch.Tensor]
    ends: torch.Tensor
    shifts: torch.Tensor
    factors: torch.Tensor
    targets: torch.Tensor

    def add_to(self, sums: torch.Tensor) -> None:
        """Adds the digests of the pieces to sums on the same device."""
        words = torch.cat([*self.pieces])
        plain = self._sums_of_pieces(words)
        weighted = self._sums_of_pieces(words * _odd_numbers(words.device)[: len(words)])
        sums.index_add_(0, self.targets, (weighted + plain * self.shifts) * self.factors)

    def _sums_of_pieces(self, words: torch.Tensor) -> torch.Tensor:
        totals = words.cumsum(0).index_select(0, self.ends)
        return torch.cat([totals[:1], totals[1:] - totals[:-1]])


def blocks_of(chunks: Sequence[ChunkDigest], targets: Sequence[int], most: int) -> Iterator[Block]:
    """Yields blocks of at most ``most`` words with all chunks, which are runs (:attr:`ChunkDigest.is_run`).

    ``targets`` are the indices of the digests that the chunks are part of.
    """
    rows, used = [], 0
    for chunk, target in zip(chunks, targets, strict=True):
        words, start = chunk.values.view(torch.int64), 0
        while start < len(words):
            stop = min(len(words), start + most - used)
            end, shift = used + stop - start - 1, 2 * (chunk.first_word + start - used)
            rows.append((words[start:stop], end, shift, chunk.factor, target))
            start, used = stop, end + 1
            if used == most:
                yield _block(rows)
                rows, used = [], 0
    if rows:
        yield _block(rows)


def _block(rows: Sequence[tuple]) -> Block:
    pieces, *numbers = zip(*rows, strict=True)
    return Block(pieces, *torch.tensor(numbers, dtype=torch.int64).to(pieces[0].device))


class _OnDevice(NamedTuple):
    """Tensor chunks on one device: those in blocks, and others with the indices of their digests."""

    blocks: list[Block]
    chunks: list[ChunkDigest]
    targets: torch.Tensor


class StateDigest:
    """Digests of the state on this rank, by key.

    The views of the state must stay valid; make another object when state has moved.

    Args:
        fragments: all tensor chunks of the state on this rank.
        keys: all keys of the model, identical on all ranks: see :func:`keys_of`.
    """

    def __init__(self, fragments: Iterable[Fragment], keys: Sequence[Key]):
        self.keys = tuple(keys)
        index = {key: number for number, key in enumerate(self.keys)}
        self._chunks, self._targets = [], []
        for fragment in fragments:
            self._chunks.append(ChunkDigest.of(fragment))
            self._targets.append(index[key_of(fragment)] + (0 if fragment.first_copy else len(self.keys)))

    @cached_property
    def _by_device(self) -> list[_OnDevice]:
        """Chunks of each device: device memory first, then host memory (offload)."""
        positions, groups = _positions_by_device(self._chunks), []
        first = next(iter(positions), torch.device("cpu"))
        for device, found in positions.items():
            packed = {i: self._chunks[i] for i in found if device.type != "cpu" and self._chunks[i].is_run}
            others = [i for i in found if i not in packed]
            blocks = [*blocks_of([*packed.values()], [self._targets[i] for i in packed], _most_words(device))]
            targets = torch.tensor([self._targets[i] for i in others], dtype=torch.int64).to(first)
            groups.append(_OnDevice(blocks, [self._chunks[i] for i in others], targets))
        return groups

    def compute(self) -> torch.Tensor:
        """Returns the sums of the current state, int64 of shape [2, keys]: first copies, and other copies.

        On CUDA, the sums are computed on the current stream, and the host does not wait for them.
        """
        device = self._by_device[0].targets.device if self._chunks else torch.device("cpu")
        sums = torch.zeros(2 * len(self.keys), dtype=torch.int64, device=device)
        for blocks, chunks, targets in self._by_device:
            for block in blocks:
                block.add_to(sums)
            if chunks:
                sums.index_add_(0, targets, torch.stack([chunk() for chunk in chunks]).to(device, non_blocking=True))
        return sums.view(2, -1)

    def elements(self) -> torch.Tensor:
        """Returns the number of elements, int64 of shape [2, keys]: first copies, and other copies."""
        counts = torch.zeros(2 * len(self.keys), dtype=torch.int64)
        sizes = torch.tensor([chunk.values.numel() for chunk in self._chunks], dtype=torch.int64)
        return counts.index_add_(0, torch.tensor(self._targets, dtype=torch.int64), sizes).view(2, -1)


def _positions_by_device(chunks: Sequence[ChunkDigest]) -> dict[torch.device, list[int]]:
    positions: dict[torch.device, list[int]] = defaultdict(list)
    for position, chunk in enumerate(chunks):
        positions[chunk.values.device].append(position)
    return dict(sorted(positions.items(), key=lambda item: item[0].type == "cpu"))


def chunk_sums(fragments: Iterable[Fragment]) -> list[tuple[Fragment, int]]:
    """Returns each tensor chunk with its share of the digest, modulo 2^64."""
    held = list(fragments)
    chunks = [ChunkDigest.of(fragment) for fragment in held]
    sums = [0] * len(held)
    for positions in _positions_by_device(chunks).values():
        values = torch.stack([chunks[position]() for position in positions])
        for position, value in zip(positions, values.tolist(), strict=True):
            sums[position] = value & MASK
    return list(zip(held, sums, strict=True))


def digest_slot(name: str, slot: str) -> str:
    """Returns the optimizer-state key of a tensor in digests; user modules have their own, which few formats hold."""
    return MODULE if name.startswith(MODULE_STATE) else slot


def key_of(fragment: Fragment) -> Key:
    """Returns the key that a tensor chunk belongs to."""
    size = f":{math.prod(fragment.global_shape)}" if fragment.padded else ""
    return fragment.operator, digest_slot(fragment.name, fragment.slot) + size


def keys_of(
    fragments: Iterable[Fragment], operators: Sequence[Operator], gather: Callable[[object], Iterable]
) -> tuple[Key, ...]:
    """Returns all keys of the model, in an order that is identical on all ranks; a collective call.

    Args:
        fragments: all tensor chunks of the state on this rank.
        operators: all operators of the model.
        gather: gathers a value of each rank.
    """
    kinds = {operator.name: operator.kind for operator in operators}
    chunks = list(fragments)
    usual = {(kinds[fragment.operator], key_of(fragment)[1]) for fragment in chunks if not fragment.padded}
    padded = {key_of(fragment) for fragment in chunks if fragment.padded}
    of_ranks = [*gather((sorted(usual), sorted(padded)))]
    slots_of_kinds = sorted({tuple(pair) for pairs, _ in of_ranks for pair in pairs})
    keys = [(operator.name, slot) for operator in operators for kind, slot in slots_of_kinds if kind == operator.kind]
    return (*keys, *sorted({tuple(key) for _, more in of_ranks for key in more}))


def to_limbs(sums: torch.Tensor) -> torch.Tensor:
    """Splits int64 sums into 32-bit limbs, which float64 adds exactly for up to two million ranks.

    Args:
        sums: int64 of shape [n].

    Returns:
        float64 of shape [2 n]: the low limbs, and the high limbs.
    """
    low = (1 << 32) - 1
    return torch.cat([sums & low, (sums >> 32) & low]).double()


def from_limbs(limbs: Sequence[float]) -> list[int]:
    """Returns the sums modulo 2^64 from the added limbs of all ranks; inverts :func:`to_limbs`."""
    half = len(limbs) // 2
    return [(int(low) + (int(high) << 32)) & MASK for low, high in zip(limbs[:half], limbs[half:], strict=True)]


def to_text(keys: Iterable[Key], sums: Iterable[int]) -> dict[str, dict[str, str]]:
    """Returns the digests that are not 0 as JSON-compatible values, by operator and optimizer-state key."""
    text: dict[str, dict[str, str]] = {}
    for (operator, slot), value in zip(keys, sums, strict=True):
        if value & MASK:
            text.setdefault(operator, {})[slot] = f"{value & MASK:016x}"
    return text


def total_of(parts: Iterable[Mapping[str, Mapping[str, str]]]) -> dict[Key, int]:
    """Returns the digests of the complete state from the digests of its parts; inverts :func:`to_text`."""
    total: dict[Key, int] = {}
    for part in parts:
        for operator, slots in part.items():
            for slot, text in slots.items():
                key = operator, slot
                total[key] = (total.get(key, 0) + int(text, 16)) & MASK
    return total


def differing_operators(
    current: Mapping[Key, int], expected: Mapping[Key, int], unknown: Iterable[str] = ()
) -> list[str]:
    """Returns the operators whose digests differ; a digest that is absent is 0.

    Args:
        current: digests of the state.
        expected: digests that the state should have.
        unknown: operators that are not compared.
    """
    skipped = set(unknown)
    wrong = {key[0] for key in current.keys() | expected.keys() if current.get(key, 0) != expected.get(key, 0)}
    return sorted(wrong - skipped)


def part_id(fragments: Sequence[Fragment]) -> str:
    """Returns an ID that is equal for the same elements of the same tensors."""
    parts = sorted((f.name, f.slot, f.region.offset, f.region.shape) for f in fragments)
    return xxhash.xxh3_64_hexdigest(repr(parts).encode())


def part_ids(state: TrainingState) -> dict[str, str]:
    """Returns, by operator, an ID of this rank's part: see :class:`moc.recovery.plan.JobInventory`."""
    return {operator: part_id(fragments) for operator, fragments in fragments_by_operator(state).items()}


def fragments_by_operator(state: TrainingState) -> dict[str, list[Fragment]]:
    """Returns this rank's tensor chunks by operator, with their state for saving in full."""
    held = defaultdict(list)
    for fragment in state.fragments(state.operators(), Detail.FULL):
        held[fragment.operator].append(fragment)
    return held
