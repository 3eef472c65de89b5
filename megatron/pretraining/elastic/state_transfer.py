"""Moves optimizer state to its new owners: round by round, in all-to-alls of bounded size.

Arriving state is separate from state in use. Chunks in transit take additional memory: on average over the workers, at
most :data:`moc.elastic.transfers.MAX_CHUNK_BYTES` bytes in each direction.

Manages one worker's shards of dense optimizer state, and their move to another assignment (ZeRO-1 with shadows).
After a membership change, survivors hold the same blocks, and a shadow replaces a lost owner. From there, state moves
to the assignment of the new members. All of it arrives in staging memory, and all workers confirm this. Only then it
is taken over and the rest dropped: a loss before that leaves everything unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.pretraining.config import Config
from megatron.pretraining.elastic.groups import exchange_group
from megatron.pretraining.elastic.placement import Nodes, PlansDiffer
from megatron.pretraining.engine.owned import MASTER, owned_slices, write_step
from megatron.pretraining.engine.sharded import ShardedOptimizer
from moc.elastic.transfers import (
    MAX_CHUNK_BYTES,
    ChunkTransfer,
    ShardAssignment,
    StateTensor,
    assign_blocks,
    plan_transfers,
)
from moc.fault_points import reach
from moc.runtime.collectives import gather, synchronize_group
from moc.state.operators import OwnedSlice, Region

Parts = Sequence[torch.Tensor]
"""Flat tensors of bytes, whose concatenation is the state of an operator."""


def as_bytes(tensors: Iterable[torch.Tensor]) -> Parts:
    """Returns flat tensors of any dtype as bytes, in the same memory."""
    return [tensor.view(torch.uint8) for tensor in tensors]


def send(
    found: Iterable[ChunkTransfer], state: Callable[[str], Parts], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Executes transfers of byte chunks; a collective of the group, which numbers the ranks of the transfers.

    Args:
        found: transfers by round, identical on all ranks; regions are byte ranges of an operator's state.
        state: returns the state of an operator that this rank sends or receives; arriving chunks are written there.
        group: group of all ranks.
        device: device of the state.
    """
    before = 0
    for batch in _batches(found, MAX_CHUNK_BYTES * dist.get_world_size(group)):
        if batch[0].round > before:
            before = batch[0].round
            reach("passing_on")
        _exchange(batch, state, group, device)


def _exchange(
    batch: Sequence[ChunkTransfer], state: Callable[[str], Parts], group: dist.ProcessGroup, device: torch.device
) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    out = sorted((one for one in batch if one.source == rank), key=lambda one: one.target)
    new = sorted((one for one in batch if one.target == rank), key=lambda one: one.source)
    sent, coming = [0] * size, [0] * size
    for one in out:
        sent[one.target] += one.chunk.nbytes
    for one in new:
        coming[one.source] += one.chunk.nbytes
    leaving = [view for one in out for view in _views(state, one)]
    outgoing = torch.cat(leaving) if leaving else torch.empty(0, dtype=torch.uint8, device=device)
    incoming = torch.empty(sum(coming), dtype=torch.uint8, device=device)
    dist.all_to_all_single(incoming, outgoing, coming, sent, group=group)
    arrived = [view for one in new for view in _views(state, one)]
    for view, values in zip(arrived, incoming.split([len(view) for view in arrived]), strict=True):
        view.copy_(values)


def _views(state: Callable[[str], Parts], one: ChunkTransfer) -> Iterator[torch.Tensor]:
    """Yields the memory of a chunk."""
    (start,), (count,) = one.chunk.region.offset, one.chunk.region.shape
    stop, begin = start + count, 0
    for part in state(one.chunk.operator):
        first, last = max(start - begin, 0), min(stop - begin, len(part))
        if first < last:
            yield part[first:last]
        begin += len(part)


def _batches(found: Iterable[ChunkTransfer], most: int) -> Iterator[list[ChunkTransfer]]:
    """Yields the transfers in order, in batches of one round and at most ``most`` bytes (or one transfer)."""
    batch: list[ChunkTransfer] = []
    size = 0
    for one in found:
        if batch and (size + one.chunk.nbytes > most or batch[0].round != one.round):
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += one.chunk.nbytes
    if batch:
        yield batch


class Shards:
    """Blocks of dense parameters that this worker holds, for its stage and tensor-parallel rank.

    Attributes:
        cut: assignment in force.
        awaited: assignment of a move while this worker has its part and may not know whether all have; or None.
        wanted: assignment to move state to; None if it is in force.
    """

    def __init__(self, config: Config, optimizer: ShardedOptimizer, nodes: Nodes):
        self._config, self._optimizer = config, optimizer
        self._sizes = [block.numel for block in optimizer.blocks]
        self._arrived: dict[int, torch.Tensor] = {}
        self.awaited: ShardAssignment | None = None
        self.wanted: ShardAssignment | None = None
        self.begin(nodes)

    def begin(self, nodes: Nodes) -> None:
        """Puts the assignment of these nodes in force without a move: all workers begin, or load their state."""
        self.take(self.cut_of(nodes))
        self.wanted = None

    def cut_of(self, nodes: Nodes) -> ShardAssignment:
        """Returns the assignment for the workers of these nodes."""
        return assign_blocks(self._sizes, *self.spread(nodes), self._config.elastic.elastic_min_replicas)

    def spread(self, nodes: Nodes) -> tuple[tuple[int, ...], int]:
        """Returns node numbers, and data-parallel ranks of each; each rank counts as a node if nodes share models."""
        tensor = self._config.parallel.tensor_model_parallel_size
        if nodes.ranks % tensor:
            return tuple(range(len(nodes.members) * nodes.ranks // tensor)), 1
        return nodes.members, nodes.ranks // tensor

    def take(self, cut: ShardAssignment) -> None:
        """Puts another assignment in force without moving state: blocks that this worker keeps are unchanged."""
        self._optimizer.set_holders(cut.holders)
        self.cut, self.awaited, self._arrived = cut, None, {}

    def move_to(self, cut: ShardAssignment) -> int:
        """Moves state to another assignment, between two iterations; a collective call of each stage.

        Returns:
            Bytes that arrived at this worker.
        """
        self._arrived = self._exchanged(cut)
        reach("rebalancing")
        self.awaited = cut
        synchronize_group(exchange_group(), self._device)
        reach("landed")
        taken = sum(state.nbytes for state in self._arrived.values())
        self.land(cut)
        self.wanted = None
        return taken

    def land(self, cut: ShardAssignment) -> None:
        """Takes over arrived state, once it is known that all workers have received their parts.

        Args:
            cut: :attr:`awaited`, for the remaining members.
        """
        arrived = self._arrived
        self.take(cut)
        for number, owned in self._slices():
            if number in arrived:
                self._unpack(owned, arrived[number])

    def _exchanged(self, after: ShardAssignment) -> dict[int, torch.Tensor]:
        """Exchanges the state that an assignment needs; returns arrived state by block."""
        before, rank = self.cut.holders, dist.get_rank(self._group)
        tensors = [
            StateTensor(str(number), "", "", Region((0,), (self._nbytes(size),)), 1)
            for number, size in enumerate(self._sizes)
        ]
        found = plan_transfers(
            tensors,
            {str(number): holders for number, holders in enumerate(before)},
            {str(number): holders for number, holders in enumerate(after.holders)},
        )
        new = [number for number, holders in enumerate(after.holders) if rank in holders and rank not in before[number]]
        arrived = {
            number: torch.empty(self._nbytes(self._sizes[number]), dtype=torch.uint8, device=self._device)
            for number in new
        }
        slices = dict(self._slices())

        def state(number: str) -> Parts:
            block = int(number)
            return [arrived[block]] if block in arrived else self._parts(slices[block])

        send(found, state, self._group, self._device)
        return arrived

    def _slices(self) -> Iterator[tuple[int, OwnedSlice]]:
        """Returns numbers and states of the blocks held here."""
        return zip(self._optimizer.shards, owned_slices(self._optimizer), strict=True)

    def _nbytes(self, numel: int) -> int:
        """Returns the bytes of a block's state: master weights, moments, and the update count."""
        formats = getattr(self._optimizer.optimizer, "name_to_dtype_map", {})
        moments = [formats.get(name, torch.float32).itemsize for name in ("exp_avg", "exp_avg_sq")]
        return (torch.float32.itemsize + sum(moments)) * numel + torch.int64.itemsize

    def _parts(self, owned: OwnedSlice) -> Parts:
        """Returns views of a block's state, and a copy of its update count."""
        steps = torch.tensor([int(owned.counter.get("step", 0))], dtype=torch.int64, device=self._device)
        return as_bytes([*(slot for _, slot in sorted(owned.slots.items())), steps])

    @torch.no_grad()
    def _unpack(self, owned: OwnedSlice, state: torch.Tensor) -> None:
        slots = [slot for _, slot in sorted(owned.slots.items())]
        *parts, steps = state.split([*(slot.nbytes for slot in slots), torch.int64.itemsize])
        for slot, part in zip(slots, parts, strict=True):
            slot.view(torch.uint8).copy_(part)
        owned.parameter.view(-1)[owned.start : owned.stop].copy_(owned.slots[MASTER])
        write_step(owned.counter, int.from_bytes(bytes(steps.tolist()), "little"))

    @property
    def _group(self) -> dist.ProcessGroup:
        group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return group

    @property
    def _device(self) -> torch.device:
        return self._optimizer.device


def settle_shards(shards: Shards, nodes: Nodes, trained: bool) -> bool:
    """Agrees on the holders of each block if some workers have trained; a collective call of all workers.

    State that has landed on one worker lands on all. Workers that have not ``trained`` hold nothing. If another
    assignment is needed, it is :attr:`Shards.wanted`.

    Returns:
        Whether each block has a holder, in all stages and tensor-parallel ranks.

    Raises:
        RuntimeError: workers that have trained hold blocks by different assignments.
    """
    place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    mine = [cut.digest if cut is not None and trained else None for cut in (shards.cut, shards.awaited)]
    told = [ReportedShards(tuple(where), *rest) for where, *rest in gather((place, trained, *mine))]
    known, beside = _shared(told, shards), [one for one in told if one.place == place]
    as_now = partial(
        ShardAssignment.restricted_to, members=shards.spread(nodes)[0], has_state=[one.trained for one in beside]
    )
    in_force = {as_now(known[one.cut]) for one in beside if one.cut}
    landing = in_force & {as_now(known[one.awaited]) for one in beside if one.awaited}
    possible = landing or in_force or {as_now(shards.cut)}
    if len(possible) > 1:
        raise PlansDiffer(
            "workers that are left hold optimizer state by different cuts. Fix: restart the job from its last "
            "checkpoint, and report this as an error of the program"
        )
    now, wanted = possible.pop(), shards.cut_of(nodes)
    if shards.awaited is not None and trained and as_now(shards.awaited) == now:
        shards.land(now)
    elif not now.lost_blocks:
        shards.take(now)
    shards.wanted = None if now == wanted else wanted
    return not any(gather(bool(now.lost_blocks)))


class ReportedShards(NamedTuple):
    """State that a worker reports when workers connect.

    Attributes:
        place: its pipeline stage and tensor-parallel rank; workers with equal ones hold blocks of the same parameters.
        trained: whether it has state of the run.
        cut: digest of its assignment in force; None if it has not trained.
        awaited: digest of :attr:`Shards.awaited`; None if it has not trained.
    """

    place: tuple[int, ...]
    trained: bool
    cut: str | None
    awaited: str | None


def _shared(told: Sequence[ReportedShards], shards: Shards) -> dict[str, ShardAssignment]:
    """Returns all assignments by digest, each from the first worker that has it; a collective call."""
    first: dict[str | None, int] = {}
    for rank, one in enumerate(told):
        first.setdefault(one.cut, rank)
        first.setdefault(one.awaited, rank)
    mine = {cut.digest: cut for cut in (shards.cut, shards.awaited) if cut is not None}
    shared = {key: cut.to_json() for key, cut in mine.items() if first.get(key) == dist.get_rank()}
    return {key: ShardAssignment.from_json(one) for part in gather(shared) for key, one in part.items()}
