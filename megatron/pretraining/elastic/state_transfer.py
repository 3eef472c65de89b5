"""Moves optimizer state to its new owners: round by round, in all-to-alls of bounded size.

Arriving state is separate from state in use. Chunks in transit take additional memory: on average over the workers, at
most :data:`moc.elastic.transfers.MAX_CHUNK_BYTES` bytes in each direction.

Manages one worker's shards of dense optimizer state, and their move to another assignment (ZeRO-1 with shadows).
After a membership change, survivors hold the same blocks, and a shadow replaces a lost owner. Then state moves to the
assignment of the new members: it arrives in staging memory, and all workers confirm the arrival. Only then each worker
takes over the new blocks and drops the old ones. A loss before the confirmation changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
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
    transfers: Iterable[ChunkTransfer], state: Callable[[str], Parts], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Executes transfers of byte chunks; a collective of the group, which numbers the ranks of the transfers.

    Args:
        transfers: transfers by round, identical on all ranks; regions are byte ranges of an operator's state.
        state: returns the state of an operator that this rank sends or receives; arriving chunks are written there.
        group: group of all ranks.
        device: device of the state.
    """
    before = 0
    for batch in _batches(transfers, MAX_CHUNK_BYTES * dist.get_world_size(group)):
        if batch[0].round > before:
            before = batch[0].round
            reach("passing_on")
        _exchange(batch, state, group, device)


def _exchange(
    batch: Sequence[ChunkTransfer], state: Callable[[str], Parts], group: dist.ProcessGroup, device: torch.device
) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    outbound = sorted((transfer for transfer in batch if transfer.source == rank), key=lambda transfer: transfer.target)
    inbound = sorted((transfer for transfer in batch if transfer.target == rank), key=lambda transfer: transfer.source)
    send_bytes, receive_bytes = [0] * size, [0] * size
    for transfer in outbound:
        send_bytes[transfer.target] += transfer.chunk.nbytes
    for transfer in inbound:
        receive_bytes[transfer.source] += transfer.chunk.nbytes
    outgoing_views = [view for transfer in outbound for view in _views(state, transfer)]
    outgoing = torch.cat(outgoing_views) if outgoing_views else torch.empty(0, dtype=torch.uint8, device=device)
    incoming = torch.empty(sum(receive_bytes), dtype=torch.uint8, device=device)
    dist.all_to_all_single(incoming, outgoing, receive_bytes, send_bytes, group=group)
    incoming_views = [view for transfer in inbound for view in _views(state, transfer)]
    for view, values in zip(incoming_views, incoming.split([len(view) for view in incoming_views]), strict=True):
        view.copy_(values)


def _views(state: Callable[[str], Parts], transfer: ChunkTransfer) -> Iterator[torch.Tensor]:
    """Yields the memory of a chunk."""
    (start,), (count,) = transfer.chunk.region.offset, transfer.chunk.region.shape
    stop, begin = start + count, 0
    for part in state(transfer.chunk.operator):
        first, last = max(start - begin, 0), min(stop - begin, len(part))
        if first < last:
            yield part[first:last]
        begin += len(part)


def _batches(transfers: Iterable[ChunkTransfer], max_bytes: int) -> Iterator[list[ChunkTransfer]]:
    """Yields the transfers in order, in batches of one round and at most ``max_bytes`` bytes (or one transfer)."""
    batch: list[ChunkTransfer] = []
    size = 0
    for transfer in transfers:
        if batch and (size + transfer.chunk.nbytes > max_bytes or batch[0].round != transfer.round):
            yield batch
            batch, size = [], 0
        batch.append(transfer)
        size += transfer.chunk.nbytes
    if batch:
        yield batch


class Shards:
    """Blocks of dense parameters that this worker holds, for its stage and tensor-parallel rank.

    Attributes:
        assignment: assignment in force.
        awaited: assignment of a move while this worker has its part and may not know whether all have; or None.
        target: assignment to move state to; None if it is in force.
    """

    def __init__(self, config: Config, optimizer: ShardedOptimizer, nodes: Nodes):
        self._config, self._optimizer = config, optimizer
        self._sizes = [block.numel for block in optimizer.blocks]
        self._arrived: dict[int, torch.Tensor] = {}
        self.awaited: ShardAssignment | None = None
        self.target: ShardAssignment | None = None
        self.begin(nodes)

    def begin(self, nodes: Nodes) -> None:
        """Puts the assignment of these nodes in force without a move: all workers begin, or load their state."""
        self.take(self.assignment_for(nodes))
        self.target = None

    def assignment_for(self, nodes: Nodes) -> ShardAssignment:
        """Returns the assignment for the workers of these nodes."""
        return assign_blocks(self._sizes, *self.spread(nodes), self._config.elastic.elastic_min_replicas)

    def spread(self, nodes: Nodes) -> tuple[tuple[int, ...], int]:
        """Returns node numbers, and data-parallel ranks of each; each rank counts as a node if nodes share models."""
        tensor = self._config.parallel.tensor_model_parallel_size
        if nodes.ranks % tensor:
            return tuple(range(len(nodes.members) * nodes.ranks // tensor)), 1
        return nodes.members, nodes.ranks // tensor

    def take(self, assignment: ShardAssignment) -> None:
        """Puts another assignment in force without moving state: blocks that this worker keeps are unchanged."""
        self._optimizer.set_holders(assignment.holders)
        self.assignment, self.awaited, self._arrived = assignment, None, {}

    def move_to(self, assignment: ShardAssignment) -> int:
        """Moves state to another assignment, between two iterations; a collective call of each stage.

        Returns:
            Bytes that arrived at this worker.
        """
        self._arrived = self._exchanged(assignment)
        reach("rebalancing")
        self.awaited = assignment
        synchronize_group(exchange_group(), self._device)
        reach("landed")
        received_bytes = sum(state.nbytes for state in self._arrived.values())
        self.land(assignment)
        self.target = None
        return received_bytes

    def land(self, assignment: ShardAssignment) -> None:
        """Takes over arrived state, once it is known that all workers have received their parts.

        Args:
            assignment: :attr:`awaited`, for the remaining members.
        """
        arrived = self._arrived
        self.take(assignment)
        for number, owned in self._slices():
            if number in arrived:
                self._unpack(owned, arrived[number])

    def _exchanged(self, after: ShardAssignment) -> dict[int, torch.Tensor]:
        """Exchanges the state that an assignment needs; returns arrived state by block."""
        before, rank = self.assignment.holders, dist.get_rank(self._group)
        tensors = [
            StateTensor(str(number), "", "", Region((0,), (self._nbytes(size),)), 1)
            for number, size in enumerate(self._sizes)
        ]
        transfers = plan_transfers(
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

        @cache  # each copy of an update count to the device waits for the transfers before
        def state(number: str) -> Parts:
            block = int(number)
            return [arrived[block]] if block in arrived else self._parts(slices[block])

        send(transfers, state, self._group, self._device)
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
    assignment is needed, it is :attr:`Shards.target`.

    Returns:
        Whether each block has a holder, in all stages and tensor-parallel ranks.

    Raises:
        RuntimeError: workers that have trained hold blocks by different assignments.
    """
    coordinates = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    digests = [
        assignment.digest if assignment is not None and trained else None
        for assignment in (shards.assignment, shards.awaited)
    ]
    reports = [ReportedShards(tuple(reported), *rest) for reported, *rest in gather((coordinates, trained, *digests))]
    assignment_of, peers = _shared(reports, shards), [report for report in reports if report.coordinates == coordinates]
    restrict = partial(
        ShardAssignment.restricted_to, members=shards.spread(nodes)[0], has_state=[peer.trained for peer in peers]
    )
    in_force = {restrict(assignment_of[peer.assignment]) for peer in peers if peer.assignment}
    landing = in_force & {restrict(assignment_of[peer.awaited]) for peer in peers if peer.awaited}
    possible = landing or in_force or {restrict(shards.assignment)}
    if len(possible) > 1:
        raise PlansDiffer(
            "workers that are left hold optimizer state by different cuts. Fix: restart the job from its last "
            "checkpoint, and report this as an error of the program"
        )
    current, target = possible.pop(), shards.assignment_for(nodes)
    if shards.awaited is not None and trained and restrict(shards.awaited) == current:
        shards.land(current)
    elif not current.lost_blocks:
        shards.take(current)
    shards.target = None if current == target else target
    return not any(gather(bool(current.lost_blocks)))


class ReportedShards(NamedTuple):
    """State that a worker reports when workers connect.

    Attributes:
        coordinates: pipeline stage and tensor-parallel rank; workers with equal coordinates hold blocks of the same
            parameters.
        trained: whether it has state of the run.
        assignment: digest of its assignment in force; None if it has not trained.
        awaited: digest of :attr:`Shards.awaited`; None if it has not trained.
    """

    coordinates: tuple[int, ...]
    trained: bool
    assignment: str | None
    awaited: str | None


def _shared(reports: Sequence[ReportedShards], shards: Shards) -> dict[str, ShardAssignment]:
    """Returns all assignments by digest, each from the first worker that has it; a collective call."""
    first: dict[str | None, int] = {}
    for rank, report in enumerate(reports):
        first.setdefault(report.assignment, rank)
        first.setdefault(report.awaited, rank)
    local = {
        assignment.digest: assignment for assignment in (shards.assignment, shards.awaited) if assignment is not None
    }
    shared = {key: assignment.to_json() for key, assignment in local.items() if first.get(key) == dist.get_rank()}
    return {key: ShardAssignment.from_json(data) for part in gather(shared) for key, data in part.items()}
