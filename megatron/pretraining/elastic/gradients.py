"""Sums the gradients of replicated experts among their holders, shard by shard, in rank order.

The gradient of an expert with r holders is cut into r shards. One all-to-all sends each shard to its holder, which sums
the copies in rank order. A second all-to-all returns the sums. So all holders get the same bits, without a process
group per set of holders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from megatron.pretraining.elastic.groups import exchange_group
from megatron.pretraining.elastic.moe_layer import ElasticExperts, ElasticLayer, elastic_layers
from megatron.pretraining.engine.owned import parameters_and_masters

Message = list[list[torch.Tensor]]
"""Flat tensors to or from each rank of the group."""


class ElasticDataParallel(DistributedDataParallel):
    """megatron-core's data parallelism, which also reduces the gradients of experts."""

    def finish_grad_sync(self, *args, **kwargs) -> None:
        """Reduces dense gradients over data-parallel ranks, and expert gradients over their holders."""
        super().finish_grad_sync(*args, **kwargs)
        for layer in elastic_layers([self]):
            sum_gradients(layer.experts, exchange_group())


@torch.no_grad()
def sum_gradients(experts: ElasticExperts, group: dist.ProcessGroup) -> None:
    """Sums the gradients of a layer's experts over their holders, in place; a collective of the group."""
    rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
    shards = {
        expert: _flat(gradient_views(mlp.parameters())).tensor_split(len(experts.holders[expert]))
        for expert, mlp in experts.assigned()
        if len(experts.holders[expert]) > 1
    }
    dtype, device = _dtype_and_device(experts)

    def local_shard(expert: int) -> torch.Tensor:
        return shards[expert][experts.holders[expert].index(rank)]

    def shared_with(peer: int) -> list[int]:
        return [expert for expert in shards if peer in experts.holders[expert]]

    sent = [[shards[e][experts.holders[e].index(peer)] for e in shared_with(peer)] for peer in ranks]
    received = _exchange(
        sent, [[local_shard(e).numel() for e in shared_with(peer)] for peer in ranks], group, dtype, device
    )
    copies = {e: [received[holder][shared_with(holder).index(e)] for holder in experts.holders[e]] for e in shards}
    sums = {expert: _sum_in_order(parts) for expert, parts in copies.items()}
    returned = [[sums[e] for e in shared_with(peer)] for peer in ranks]
    sizes = [[shard.numel() for shard in rank_shards] for rank_shards in sent]
    summed = _exchange(returned, sizes, group, dtype, device)
    for expert, mlp in experts.assigned():
        if expert in shards:
            parts = [summed[holder][shared_with(holder).index(expert)] for holder in experts.holders[expert]]
            _fill(gradient_views(mlp.parameters()), torch.cat(parts))


def gradient_views(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Returns the views of megatron-core's buffers that accumulate the gradients of parameters."""
    marked: Iterable[Any] = parameters
    return [parameter.main_grad for parameter in marked]


def _dtype_and_device(experts: ElasticExperts) -> tuple[torch.dtype, torch.device]:
    gradient = next(iter(gradient_views(experts.parameters())))
    return gradient.dtype, gradient.device


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.view(-1) for tensor in tensors])


def _fill(tensors: list[torch.Tensor], values: torch.Tensor) -> None:
    for tensor, part in zip(tensors, values.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.view(-1).copy_(part)


def _sum_in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _exchange(
    sent: Message, sizes: list[list[int]], group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device
) -> Message:
    outgoing = [tensor for rank_tensors in sent for tensor in rank_tensors]
    packed = torch.cat(outgoing) if outgoing else torch.empty(0, dtype=dtype, device=device)
    lengths = [sum(rank_sizes) for rank_sizes in sizes]
    arrived = torch.empty(sum(lengths), dtype=dtype, device=device)
    sent_lengths = [sum(tensor.numel() for tensor in rank_tensors) for rank_tensors in sent]
    dist.all_to_all_single(arrived, packed, lengths, sent_lengths, group=group)
    return [list(part.split(rank_sizes)) for part, rank_sizes in zip(arrived.split(lengths), sizes, strict=True)]


def count_once(layers: Iterable[ElasticLayer], optimizer: MegatronOptimizer) -> None:
    """Counts an expert in norms only on its first holder, and excludes unused slots from training."""
    rank, first = dist.get_rank(exchange_group()), set()
    for layer in layers:
        for expert, mlp in layer.experts.assigned():
            if layer.experts.holders[expert][0] == rank:
                first |= set(mlp.parameters())
    for parameter, master in _expert_parameters(optimizer):
        parameter.requires_grad_(not parameter.unused)
        parameter.shared = master.shared = parameter not in first  # megatron-core leaves shared ones out of norms


def _expert_parameters(optimizer: MegatronOptimizer) -> Iterator[tuple[Any, Any]]:
    for parameter, master in parameters_and_masters(optimizer):
        if not getattr(parameter, "allreduce", True):
            yield parameter, master
