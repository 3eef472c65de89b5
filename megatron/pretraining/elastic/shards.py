"""The shards of dense optimizer state on one worker, and their move to another cut (ZeRO-1 with shadows).

When members change, those that are left hold what they held: where the owner of a block is gone, a shadow owns it.
From there, state moves to the cut of the new members.  All of it arrives in staging memory, all workers agree that it
has landed, and only then it is taken over and the rest dropped: a loss before that leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.pretraining.config import Config
from megatron.pretraining.elastic.groups import exchange_group
from megatron.pretraining.elastic.placing import Nodes, PlansDiffer
from megatron.pretraining.elastic.sending import Parts, as_bytes, send
from megatron.pretraining.engine.owned import MASTER, owned_slices, write_step
from megatron.pretraining.engine.sharded import ShardedOptimizer
from moc.elastic.boxes import Tensor, transfers
from moc.elastic.shards import Cut, cut
from moc.faults import reach
from moc.runtime.agreement import gather, settled_among
from moc.state.fragments import OwnedSlice
from moc.state.region import Region


class Shards:
    """The blocks that this worker holds of the dense parameters of its stage and tensor-parallel rank.

    Attributes:
        cut: in force.
        awaited: the cut that a move leads to, while this worker has got its part and may not know that all have; or
            None.
        wanted: the cut to which state is yet to move; None if it is in force.
    """

    def __init__(self, config: Config, optimizer: ShardedOptimizer, nodes: Nodes):
        self._config, self._optimizer = config, optimizer
        self._sizes = [block.numel for block in optimizer.blocks]
        self._arrived: dict[int, torch.Tensor] = {}
        self.awaited: Cut | None = None
        self.wanted: Cut | None = None
        self.begin(nodes)

    def begin(self, nodes: Nodes) -> None:
        """Has the cut of these nodes in force at once, where nothing is to move: all begin, or load their state."""
        self.take(self.cut_of(nodes))
        self.wanted = None

    def cut_of(self, nodes: Nodes) -> Cut:
        """The cut that workers of these nodes are to have."""
        return cut(self._sizes, *self.spread(nodes), self._config.elastic.elastic_min_replicas)

    def spread(self, nodes: Nodes) -> tuple[tuple[int, ...], int]:
        """Numbers of the nodes, and data-parallel ranks of each; each rank counts as one where nodes share models."""
        tensor = self._config.parallel.tensor_model_parallel_size
        if nodes.ranks % tensor:
            return tuple(range(len(nodes.members) * nodes.ranks // tensor)), 1
        return nodes.members, nodes.ranks // tensor

    def take(self, cut: Cut) -> None:
        """Has another cut in force, and moves no state: blocks that this worker keeps stay as they are."""
        self._optimizer.hold(cut.holders)
        self.cut, self.awaited, self._arrived = cut, None, {}

    def move_to(self, cut: Cut) -> int:
        """Moves state to another cut, between two iterations; a collective call of each stage.

        Returns:
            Bytes that arrived at this worker.
        """
        self._arrived = self._exchanged(cut)
        reach("rebalancing")
        self.awaited = cut
        settled_among(exchange_group(), self._device)
        reach("landed")
        taken = sum(state.nbytes for state in self._arrived.values())
        self.land(cut)
        self.wanted = None
        return taken

    def land(self, cut: Cut) -> None:
        """Takes over what has arrived, once it is known that all had got their parts.

        Args:
            cut: :attr:`awaited`, as it is for the members that are left.
        """
        arrived = self._arrived
        self.take(cut)
        for number, owned in self._slices():
            if number in arrived:
                self._unpack(owned, arrived[number])

    def _exchanged(self, after: Cut) -> dict[int, torch.Tensor]:
        """Sends and receives what a cut needs; returns what has arrived, by block."""
        before, rank = self.cut.holders, dist.get_rank(self._group)
        tensors = [
            Tensor(str(number), "", "", Region((0,), (self._nbytes(size),)), 1)
            for number, size in enumerate(self._sizes)
        ]
        found = transfers(
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
        """The state of the blocks held here, by number."""
        return zip(self._optimizer.held, owned_slices(self._optimizer), strict=True)

    def _nbytes(self, numel: int) -> int:
        """Bytes of a block's state: master weights, moments, and the count of updates."""
        formats = getattr(self._optimizer.optimizer, "name_to_dtype_map", {})
        moments = [formats.get(name, torch.float32).itemsize for name in ("exp_avg", "exp_avg_sq")]
        return (torch.float32.itemsize + sum(moments)) * numel + torch.int64.itemsize

    def _parts(self, owned: OwnedSlice) -> Parts:
        """The state of a block in its memory, and a copy of the count of updates."""
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


def settle(shards: Shards, nodes: Nodes, trained: bool) -> bool:
    """Agrees on who holds which block, where some workers have trained; a collective call of all workers.

    State that has landed on one worker lands on all.  Workers that have not ``trained`` hold nothing.  If another cut
    is to be had, it is :attr:`Shards.wanted`.

    Returns:
        Whether somebody holds each block, of all workers.

    Raises:
        RuntimeError: workers that have trained hold blocks by different cuts.
    """
    place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    mine = [cut.digest if cut is not None and trained else None for cut in (shards.cut, shards.awaited)]
    told = [Told(tuple(where), *rest) for where, *rest in gather((place, trained, *mine))]
    known, beside = _shared(told, shards), [one for one in told if one.place == place]
    as_now = partial(Cut.among, members=shards.spread(nodes)[0], holds=[one.trained for one in beside])
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
    elif not now.missing:
        shards.take(now)
    shards.wanted = None if now == wanted else wanted
    return not any(gather(bool(now.missing)))


class Told(NamedTuple):
    """What a worker tells the others when they meet.

    Attributes:
        place: its pipeline stage and tensor-parallel rank: those beside it hold blocks of the same parameters.
        trained: it has state of the run.
        cut: digest of the one in force on it; None if it has not trained.
        awaited: the same of :attr:`Shards.awaited`.
    """

    place: tuple[int, ...]
    trained: bool
    cut: str | None
    awaited: str | None


def _shared(told: Sequence[Told], shards: Shards) -> dict[str, Cut]:
    """All cuts by digest, each from the first worker that has it; a collective call."""
    first: dict[str | None, int] = {}
    for rank, one in enumerate(told):
        first.setdefault(one.cut, rank)
        first.setdefault(one.awaited, rank)
    mine = {cut.digest: cut for cut in (shards.cut, shards.awaited) if cut is not None}
    shared = {key: cut.to_json() for key, cut in mine.items() if first.get(key) == dist.get_rank()}
    return {key: Cut.from_json(one) for part in gather(shared) for key, one in part.items()}
