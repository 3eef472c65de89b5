"""Dispatches tokens to any number of replicas of any expert, without padding (Lazarus, section 4.2).

All ranks of a domain gather each rank's token counts by expert, and compute the same flows from them. So every rank
knows its sends and receives. Tokens travel in one all-to-all, ordered by receiver and expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import unpermute
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from moc.elastic.dispatch import Capacities, Exchange, exchange
from moc.runtime.device import copy_to_host


@dataclass(frozen=True)
class Route:
    """Sends and receives of one rank in a micro batch; lists are by rank of its domain.

    Attributes:
        sent: tokens to each rank.
        received: tokens from each rank.
        send_order: indices that reorder tokens sorted by expert to (receiver, expert).
        by_slot: indices that reorder received tokens from (sender, expert) to (slot, sender).
        in_slots: tokens of each slot.
    """

    sent: list[int]
    received: list[int]
    send_order: torch.Tensor
    by_slot: torch.Tensor
    in_slots: list[int]

    @property
    def restore(self) -> torch.Tensor:
        """Inverse of ``by_slot``."""
        inverse = torch.empty_like(self.by_slot)
        inverse[self.by_slot] = torch.arange(len(self.by_slot))
        return inverse


def route_of(flow: Exchange, slots: Sequence[int | None]) -> Route:
    """Returns the route of a rank whose slots hold these experts; None for an empty slot."""
    held = [expert for expert in slots if expert is not None]
    columns = sorted(held)
    arriving = flow.receives[columns].T  # by sender and expert
    return Route(
        sent=flow.sends.sum(axis=0).tolist(),
        received=arriving.sum(axis=1).tolist(),
        send_order=_transposed(flow.sends),
        by_slot=_transposed(arriving, [columns.index(expert) for expert in held]),
        in_slots=[0 if expert is None else int(flow.receives[expert].sum()) for expert in slots],
    )


def _transposed(sizes: numpy.ndarray, columns: Sequence[int] | None = None) -> torch.Tensor:
    """Returns indices that reorder chunks of these ``sizes`` from row by row to column by column."""
    starts = (sizes.cumsum() - sizes.ravel()).reshape(sizes.shape)
    if columns is not None:
        sizes, starts = sizes[:, columns], starts[:, columns]
    lengths, starts = sizes.T.ravel(), starts.T.ravel()
    before = lengths.cumsum() - lengths
    return torch.from_numpy(numpy.repeat(starts - before, lengths) + numpy.arange(lengths.sum(), dtype=numpy.int64))


def _on_device(indices: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copies indices to a device in one transfer: each copy of unpinned memory waits for the device."""
    together = torch.cat([*indices])
    together = together.pin_memory() if device.type == "cuda" else together
    return list(together.to(device, non_blocking=True).split([len(each) for each in indices]))


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
        self._shape = hidden_states.shape
        tokens, by_expert = hidden_states.view(-1, self._shape[-1]), routing_map.T
        assert self._held is not None  # hold() was called
        slots, replicas, capacities = self._held
        counts = self._gathered(routing_map)
        flow = exchange(counts, capacities(counts.sum(axis=1), replicas), dist.get_rank(self._group))
        self._route = route_of(flow, slots)
        order, self._by_slot, self._restore = _on_device(
            [self._route.send_order, self._route.by_slot, self._route.restore], tokens.device
        )
        numbers = torch.arange(len(tokens), device=tokens.device).expand(by_expert.shape)
        self._sources = numbers.masked_select(by_expert)[order]
        return tokens.index_select(0, self._sources), probs.T.masked_select(by_expert).index_select(0, order)

    def _gathered(self, routing_map: torch.Tensor) -> numpy.ndarray:
        """Returns the number of tokens by expert and rank of the group."""
        mine = routing_map.sum(dim=0, dtype=torch.int64)
        everybody = mine.new_empty(dist.get_world_size(self._group) * len(mine))
        dist.all_gather_into_tensor(everybody, mine, group=self._group)
        return numpy.ascontiguousarray(copy_to_host(everybody).view(-1, len(mine)).numpy().T)

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
