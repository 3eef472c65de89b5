"""Mixture-of-experts layer of elastic training: slots hold any experts, and experts have any number of replicas.

megatron-core's layer gives each expert-parallel rank the same number of consecutive experts. Here, it is built with one
expert per slot, as if its worker had no others. Parts that know all experts are replaced: the router, the dispatcher,
and the description of experts in checkpoints.

The dispatcher sends tokens to any number of replicas of an expert, without padding (Lazarus, section 4.2). All ranks of
a domain gather each rank's token counts by expert, and compute the same flows from them. So every rank knows its sends
and receives. Tokens travel in one all-to-all, ordered by receiver and expert.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection, unpermute
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from megatron.pretraining.elastic.groups import dispatch_group, exchange_group
from megatron.pretraining.engine.schedule import Turns
from megatron.pretraining.process.initialize import seed_streams
from megatron.pretraining.process.topology import Topology
from moc.elastic.dispatch import Capacities, Exchange, exchange_of_rank
from moc.runtime.device import HostCopy

_ROUTER_DTYPES: dict[str | None, torch.dtype] = {"fp32": torch.float32, "fp64": torch.float64}


class ElasticExperts(SequentialMLP):
    """Experts in the slots of one worker.

    Attributes:
        slots: the expert in each slot; None if empty.
        holders: by expert, the ranks of the exchange group that hold it, ascending.
    """

    not_module_state = frozenset({"slots", "holders"})
    slots: tuple[int | None, ...] = ()
    holders: tuple[tuple[int, ...], ...] = ()

    def held(self) -> Iterator[tuple[int, torch.nn.Module]]:
        """Yields this worker's experts, in ascending order, with their modules."""
        there = {e: mlp for e, mlp in zip(self.slots, self.local_experts, strict=True) if e is not None}
        yield from sorted(there.items())

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Describes experts by their numbers in the complete model; replicas are numbered in the order of holders."""
        apart, rank, described = (
            (metadata or {}).get("singleton_local_shards", False),
            dist.get_rank(exchange_group()),
            {},
        )
        for slot, expert in enumerate(self.slots):
            if expert is None:
                continue
            local, offsets = f"{prefix}local_experts.{slot}.", sharded_offsets
            whole = f"{prefix}experts.{expert}." if apart else f"{prefix}experts."
            if not apart:
                offsets = (*sharded_offsets, (len(sharded_offsets), expert, len(self.holders)))
            mlp: Any = self.local_experts[slot]
            tensors = mlp.sharded_state_dict(local, offsets, metadata)
            for tensor in tensors.values():
                tensor.key = tensor.key.replace(local, whole, 1)
                tensor.replica_id = (*tensor.replica_id[:2], self.holders[expert].index(rank))
            described |= tensors
        return described


class ElasticLayer(MoELayer):
    """Mixture-of-experts layer with slots.

    Attributes:
        is_dummy: the current micro batch is a dummy: its tokens reach no router and no expert.
    """

    is_dummy = False
    experts: ElasticExperts
    token_dispatcher: ElasticDispatcher

    def __init__(self, config: TransformerConfig, submodules: MoESubmodules, slots: int, pg_collection=None, **options):
        groups, router = get_default_pg_collection(), submodules.router
        experts: Any = submodules.experts  # a functools.partial, as in megatron-core's layer specifications
        inside = copy.copy(config)
        inside.num_moe_experts, inside.moe_token_dispatcher_type = slots, "alltoall"
        submodules = dataclasses.replace(
            submodules,
            experts=functools.partial(ElasticExperts, *experts.args, **experts.keywords),
            router=lambda config, **others: router(config=whole, **others),
        )
        whole = config
        super().__init__(inside, submodules, pg_collection=groups, **options)
        self.config, self.token_dispatcher = whole, ElasticDispatcher(whole, groups, dispatch_group())
        for parameter in self.experts.parameters():
            marked: Any = parameter
            marked.allreduce = False  # megatron-core reduces and updates experts separately

    @property
    def layer(self) -> int:
        """Number of the layer in the model, from 0."""
        assert self.layer_number is not None  # every layer of a model has one
        return self.layer_number - 1

    def hold(self, slots: Sequence[int | None], replicas: numpy.ndarray, domain: slice, capacities: Capacities) -> None:
        """Sets the experts in this worker's slots.

        Args:
            slots: the expert in each slot; None if empty.
            replicas: replicas of each expert on each rank of the exchange group, [experts, ranks].
            domain: the ranks that this worker dispatches tokens to.
            capacities: function that computes the tokens of the replicas.
        """
        self.experts.slots = tuple(slots)
        self.experts.holders = tuple(tuple(numpy.flatnonzero(row).tolist()) for row in replicas)
        for expert, mlp in zip(self.experts.slots, self.experts.local_experts, strict=True):
            for parameter in mlp.parameters():
                marked: Any = parameter
                marked.unused = expert is None
        self.token_dispatcher.hold(self.experts.slots, replicas[:, domain], capacities)

    def route(self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None = None):
        """Sends no token of a dummy micro batch to an expert, and counts none in auxiliary losses."""
        if not self.is_dummy:
            return super().route(hidden_states, padding_mask)
        tokens, experts = hidden_states.shape[:-1].numel(), self.config.num_moe_experts
        assert experts is not None  # otherwise the layer would be dense
        dtype = _ROUTER_DTYPES.get(self.config.moe_router_dtype, hidden_states.dtype)  # as on other ranks
        nothing = hidden_states.new_zeros(tokens, experts, dtype=dtype)
        return nothing, nothing.bool()


def elastic_layers(chunks: Sequence[torch.nn.Module]) -> list[ElasticLayer]:
    """Returns the elastic layers of the chunks, in model order."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, ElasticLayer)]


class ElasticDispatcher(MoETokenDispatcher):
    """Dispatcher that sends tokens to replicas of their experts, and returns the experts' output."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection, group: dist.ProcessGroup):
        super().__init__(config=config, pg_collection=groups)
        self._group = group
        self._held: tuple[Sequence[int | None], numpy.ndarray, Capacities] | None = None

    def hold(self, slots: Sequence[int | None], replicas: numpy.ndarray, capacities: Capacities) -> None:
        """Sets the experts in this rank's slots, and the capacities of replicas.

        Args:
            slots: the expert in each slot; None if empty.
            replicas: replicas of each expert on each rank of the domain, [experts, ranks].
            capacities: function that computes the tokens of the replicas.
        """
        self._held = slots, replicas, capacities

    def dispatch_preprocess(self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor):
        """Sorts copies of the tokens by receiver.

        Args:
            hidden_states: [sequence, micro batch, hidden].
            routing_map: [tokens, experts], bool.
            probs: [tokens, experts].

        Returns:
            The tokens to send [copies, hidden], and their probabilities [copies].
        """
        self._shape, (rows, experts) = hidden_states.shape, routing_map.shape
        tokens, copies = hidden_states.view(rows, -1), rows * min(self.config.moe_router_topk, experts)
        waiting = self._gather_counts(routing_map)
        # expert * rows + token; places that are left over have a valid index
        by_expert = torch.nonzero_static(routing_map.T.reshape(-1), size=copies, fill_value=0).view(-1)
        self._route = self._route_of(waiting.wait().numpy().reshape(-1, experts), rows, copies)
        order, self._by_slot, self._restore = self._route.on_device(tokens.device)
        chosen = by_expert[: len(order)].index_select(0, order)
        self._sources = chosen % rows
        return tokens.index_select(0, self._sources), probs.T.reshape(-1).index_select(0, chosen)

    def _gather_counts(self, routing_map: torch.Tensor) -> HostCopy:
        """Begins to copy the number of tokens by rank of the group and expert to the host."""
        mine = routing_map.sum(dim=0, dtype=torch.int64)
        everybody = mine.new_empty(dist.get_world_size(self._group) * len(mine))
        dist.all_gather_into_tensor(everybody, mine, group=self._group)
        return HostCopy(everybody)

    def _route_of(self, gathered: numpy.ndarray, rows: int, copies: int) -> Route:
        """Returns this rank's route for token counts of [ranks, experts].

        Raises:
            ValueError: a rank has more tokens than a micro batch, as after an abort. Indices from such counts would
                fail on the device, which is unusable afterwards.
        """
        assert self._held is not None  # hold() was called
        slots, replicas, capacities = self._held
        if gathered.min() < 0 or gathered.max() > rows or gathered.sum(axis=1).max() > copies:
            raise ValueError(f"token counts of a micro batch of {rows} tokens are invalid")
        counts = numpy.ascontiguousarray(gathered.T)
        shares = capacities(counts.sum(axis=1), replicas)
        return route_of(exchange_of_rank(counts, shares, dist.get_rank(self._group)), slots)

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor):
        """Sends tokens and probabilities to the holders."""
        return _Swap.apply(self._group, self._route.sent, self._route.received, hidden_states, probs)

    def dispatch_postprocess(self, hidden_states: torch.Tensor, probs: torch.Tensor):
        """Sorts received tokens by slot; returns them, their number by slot, and their probabilities."""
        order = self._by_slot
        counts = torch.tensor(self._route.in_slots)
        return hidden_states.index_select(0, order), counts, probs.index_select(0, order)

    def combine_preprocess(self, hidden_states: torch.Tensor):
        """Sorts the experts' output by sender."""
        return hidden_states.index_select(0, self._restore)

    def token_combine(self, hidden_states: torch.Tensor):
        """Sends the experts' output back."""
        (output,) = _Swap.apply(self._group, self._route.received, self._route.sent, hidden_states)
        return output

    def combine_postprocess(self, hidden_states: torch.Tensor):
        """Sums the output for each token, in the shape of the layer's input."""
        whole = torch.Size((self._shape[:-1].numel(), self._shape[-1]))
        return unpermute(hidden_states, self._sources, restore_shape=whole).view(self._shape)


class _Swap(torch.autograd.Function):
    """All-to-all of several tensors.

    One function for all of them gives the backward pass the same order of collectives on all ranks. It also runs if
    nothing is sent.
    """

    @staticmethod
    def forward(ctx, group: dist.ProcessGroup, sent: list[int], received: list[int], *tensors: torch.Tensor):
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return tuple(_swapped(group, tensor, sent, received) for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor):
        back = (_swapped(ctx.group, gradient, ctx.received, ctx.sent) for gradient in gradients)
        return None, None, None, *back


def _swapped(group: dist.ProcessGroup, tensor: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    swapped = tensor.new_empty(sum(received), *tensor.shape[1:])
    dist.all_to_all_single(swapped, tensor.contiguous(), received, sent, group=group)
    return swapped


class Reordering(NamedTuple):
    """Chunks of rows in a new order: row i of the result, in a chunk, is row i + ``shifts``[chunk] of the input.

    Attributes:
        lengths: rows of each chunk, int64[chunks].
        shifts: distance from the new to the old place of each chunk, int64[chunks].
    """

    lengths: numpy.ndarray
    shifts: numpy.ndarray


@dataclass(frozen=True)
class Route:
    """Sends and receives of one rank in a micro batch; lists are by rank of its domain.

    Attributes:
        sent: tokens to each rank.
        received: tokens from each rank.
        send_order: reorders tokens sorted by expert to (receiver, expert).
        by_slot: reorders received tokens from (sender, expert) to (slot, sender).
        restore: inverse of ``by_slot``.
        in_slots: tokens of each slot.
    """

    sent: list[int]
    received: list[int]
    send_order: Reordering
    by_slot: Reordering
    restore: Reordering
    in_slots: list[int]

    def on_device(self, device: torch.device) -> list[torch.Tensor]:
        """Returns the indices of ``send_order``, ``by_slot`` and ``restore``, int64 on the device.

        Only the chunks are copied, in one transfer of pinned memory: other transfers wait for the device.
        """
        sizes = [sum(self.sent), sum(self.received), sum(self.received)]
        starts = numpy.cumsum([0, *sizes[:-1]])
        orders = [self.send_order, self.by_slot, self.restore]
        lengths = numpy.concatenate([order.lengths for order in orders])
        shifts = numpy.concatenate([order.shifts - start for order, start in zip(orders, starts, strict=True)])
        chunks = torch.from_numpy(numpy.stack([lengths, shifts]))
        chunks = chunks.pin_memory() if device.type == "cuda" else chunks
        lengths, shifts = chunks.to(device, non_blocking=True)
        moved = torch.repeat_interleave(shifts, lengths, output_size=sum(sizes))
        return list(moved.add_(torch.arange(sum(sizes), device=device)).split(sizes))


def route_of(flow: Exchange, slots: Sequence[int | None]) -> Route:
    """Returns the route of a rank whose slots hold these experts; None for an empty slot."""
    held = [expert for expert in slots if expert is not None]
    columns = sorted(held)
    arriving = flow.receives[columns].T  # by sender and expert
    send_order, _ = _transpositions(flow.sends, range(flow.sends.shape[1]))
    by_slot, restore = _transpositions(arriving, [columns.index(expert) for expert in held])
    return Route(
        sent=flow.sends.sum(axis=0).tolist(),
        received=arriving.sum(axis=1).tolist(),
        send_order=send_order,
        by_slot=by_slot,
        restore=restore,
        in_slots=[0 if expert is None else int(flow.receives[expert].sum()) for expert in slots],
    )


def _transpositions(sizes: numpy.ndarray, columns: Sequence[int]) -> tuple[Reordering, Reordering]:
    """Returns the order of chunks by column, if they are stored by row, and its inverse.

    Args:
        sizes: rows of each chunk, int64[rows, columns].
        columns: the columns in their new order.
    """
    old, new, by_column = _starts(sizes), numpy.empty_like(sizes), sizes[:, columns].T
    new[:, columns] = _starts(by_column).T
    forward = Reordering(by_column.ravel(), (old - new)[:, columns].T.ravel())
    return forward, Reordering(sizes.ravel(), (new - old).ravel())


def _starts(sizes: numpy.ndarray) -> numpy.ndarray:
    return (sizes.cumsum() - sizes.ravel()).reshape(sizes.shape)


class ElasticTurns(Turns):
    """Hooks that seed random streams for each micro batch, and mark dummy micro batches in the layers.

    A dummy's tokens reach no router and no expert, and its loss is 0: it only takes part in the collectives of other
    workers.
    """

    def __init__(self, seed: int, topology: Topology, layers: Iterable[ElasticLayer]):
        super().__init__(seed, topology)
        self._layers = list(layers)
        self._iteration: int | None = None
        self._turn = 0

    def begin(self, iteration: int | None) -> None:
        self._iteration, self._turn = iteration, 0

    def take(self, compute: Callable[[], tuple[torch.Tensor, Callable]]) -> tuple[torch.Tensor, Callable]:
        turn, self._turn = self._turn, self._turn + 1
        self._come_to(turn)
        if self._iteration is not None:
            seed_streams(self._seed, self._iteration, self._topology.world, self._topology.number(turn))
        output, loss_function = compute()
        if output.requires_grad:  # a recomputed layer reads is_dummy again in this micro batch's backward pass
            output.register_hook(lambda _: self._come_to(turn))
        return output, loss_function

    def _come_to(self, turn: int) -> None:
        for layer in self._layers:
            layer.is_dummy = self._topology.is_dummy(turn)
