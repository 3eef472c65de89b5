"""Mixture-of-experts layer of elastic training: slots hold any experts, and experts have any number of replicas.

megatron-core's layer gives each expert-parallel rank the same number of consecutive experts. Here, it is built with one
expert per slot, as if its worker had no others. Parts that know all experts are replaced: the router, the dispatcher,
and the description of experts in checkpoints.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

from megatron.pretraining.elastic.dispatcher import ElasticDispatcher
from megatron.pretraining.elastic.groups import dispatch_group, exchange_group
from moc.elastic.dispatch import Capacities

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
        is_ghost: the current micro batch is a dummy: its tokens reach no router and no expert.
    """

    is_ghost = False
    experts: ElasticExperts
    token_dispatcher: ElasticDispatcher

    def __init__(self, config: TransformerConfig, submodules: MoESubmodules, slots: int, pg_collection=None, **options):
        groups, router = get_default_pg_collection(), submodules.router
        inside = copy.copy(config)
        inside.num_moe_experts, inside.moe_token_dispatcher_type = slots, "alltoall"
        submodules = dataclasses.replace(
            submodules,
            experts=_with_function(submodules.experts, ElasticExperts),
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
            domain: the ranks among which this worker dispatches tokens.
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
        if not self.is_ghost:
            return super().route(hidden_states, padding_mask)
        tokens, experts = hidden_states.shape[:-1].numel(), self.config.num_moe_experts
        assert experts is not None  # otherwise the layer would be dense
        dtype = _ROUTER_DTYPES.get(self.config.moe_router_dtype, hidden_states.dtype)  # as on other ranks
        nothing = hidden_states.new_zeros(tokens, experts, dtype=dtype)
        return nothing, nothing.bool()


def _with_function(builder: Any, function: Callable) -> functools.partial:
    """Returns a ``functools.partial``, as in megatron-core's layer specifications, that calls another function."""
    return functools.partial(function, *builder.args, **builder.keywords)


def elastic_layers(chunks: Sequence[torch.nn.Module]) -> list[ElasticLayer]:
    """Returns the elastic layers of the chunks, in model order."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, ElasticLayer)]
