"""Manages the expert replicas of one worker: the plan in force, and in-place moves to another plan.

A move proceeds layer by layer. New experts of a worker arrive in staging memory, all workers of the stage confirm this,
and only then slots are filled. A loss before the confirmation leaves the old plan of the layer in force. A worker that
misses the confirmation can fill its slots later (:mod:`megatron.pretraining.elastic.membership`).

Transfers are planned for all layers together (:func:`moc.elastic.transfers.plan_expert_transfers`): new holders each
receive a part of an expert, and forward it to each other. Staging memory holds a layer's new experts, and the chunks in
transit (:mod:`megatron.pretraining.elastic.state_transfer`).
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer

from megatron.pretraining.elastic.gradients import count_once
from megatron.pretraining.elastic.groups import exchange_group
from megatron.pretraining.elastic.moe_layer import ElasticLayer
from megatron.pretraining.elastic.placement import NodesOfStages, Plans, assign_experts
from megatron.pretraining.elastic.state_transfer import Parts, as_bytes, send
from megatron.pretraining.engine.owned import MASTER, owned_slices, write_step
from moc.elastic.plan import Loads, Plan
from moc.elastic.transfers import ChunkTransfer, expert_holders, expert_operator, plan_expert_transfers
from moc.fault_points import reach
from moc.runtime.collectives import synchronize_group


@dataclass(frozen=True)
class Landing:
    """State that has arrived for a layer, by expert, and the resulting plan."""

    layer: int
    plan: Plan
    arrived: Mapping[int, torch.Tensor]


Flow = Mapping[int, Sequence[ChunkTransfer]]
"""Transfers of a move, by layer."""


def bytes_moved(flow: Flow) -> int:
    """Returns the maximum bytes of state that one worker sends and receives."""
    bytes_of_rank: Counter[int] = Counter()
    for transfer in itertools.chain.from_iterable(flow.values()):
        bytes_of_rank[transfer.source] += transfer.chunk.nbytes
        bytes_of_rank[transfer.target] += transfer.chunk.nbytes
    return max(bytes_of_rank.values(), default=0)


class Replicas:
    """Experts that this worker holds, in all elastic layers of its stage.

    Attributes:
        layers: elastic layers by number.
        plans: plans in force, of all stages.
        nodes: nodes of these plans.
        loads: tokens of experts in recent iterations, summed in the commit all-reduce; empty if unknown.
        target: plans to move experts to after a membership change; None if they are in force.
    """

    def __init__(
        self,
        layers: Iterable[ElasticLayer],
        optimizer: MegatronOptimizer,
        plans: Plans,
        nodes: NodesOfStages,
        dispatch: str,
    ):
        self.layers = {layer.layer: layer for layer in layers}
        self.plans, self.nodes = dict(plans), nodes
        self.loads: Loads = {}
        self.target: Plans | None = None
        self._stage, self._dispatch = parallel_state.get_pipeline_model_parallel_rank(), dispatch
        self._optimizer = optimizer
        self._landing: Landing | None = None
        expert_slices = (owned for owned in owned_slices(optimizer) if not getattr(owned.parameter, "allreduce", True))
        self._slices = {owned.parameter: owned for owned in expert_slices}
        count_once(self.layers.values(), optimizer)

    def move_to(self, plans: Plans, flow: Flow | None = None) -> int:
        """Moves experts to other plans, between two iterations; a collective call of each stage.

        Args:
            plans: plans of all stages.
            flow: result of :meth:`flow_to`; computed by default.

        Returns:
            Bytes that arrived at this worker.
        """
        received_bytes = 0
        flow = self.flow_to(plans) if flow is None else flow
        for layer in sorted(self.layers):
            before, after = self.plans[self._stage], plans[self._stage]
            mixed = replace(after, tables={**before.tables, layer: after.tables[layer]})
            landing = Landing(layer, mixed, self._exchanged(layer, flow[layer]))
            reach("rebalancing")
            self._landing = landing
            synchronize_group(exchange_group(), _device(self.layers[layer]))
            reach("landed")
            self._land(landing)
            received_bytes += sum(state.nbytes for state in landing.arrived.values())
        self.plans, self.target = dict(plans), None
        count_once(self.layers.values(), self._optimizer)
        return received_bytes

    @property
    def awaited(self) -> Plan | None:
        """Plan of a layer's move while this worker has its part and may not know whether all have; or None."""
        return self._landing and self._landing.plan

    def land(self, plan: Plan) -> None:
        """Fills slots with arrived state, once it is known that all workers have received their parts.

        Args:
            plan: :attr:`awaited`, for the remaining members.
        """
        assert self._landing is not None  # it is awaited
        self._land(replace(self._landing, plan=plan))

    def take(self, plans: Plans, nodes: NodesOfStages) -> None:
        """Puts other plans in force without moving state."""
        self.plans, self.nodes, self._landing = dict(plans), nodes, None
        if self.layers:
            assign_experts(self.layers.values(), self.plans[self._stage], self._dispatch)
        count_once(self.layers.values(), self._optimizer)

    @property
    def sizes(self) -> dict[int, int]:
        """Bytes of an expert's state, by layer."""
        parts_of_layer = {number: self._parts(layer.experts.local_experts[0]) for number, layer in self.layers.items()}
        return {number: sum(map(len, parts)) for number, parts in parts_of_layer.items()}

    def flow_to(self, plans: Plans) -> Flow:
        """Returns the transfers from the plans in force to other plans."""
        if not self.layers:
            return {}
        return plan_expert_transfers(expert_holders(self.plans[self._stage]), plans[self._stage], self.sizes)

    def _land(self, landing: Landing) -> None:
        """Fills the slots of a layer with arrived state."""
        layer = self.layers[landing.layer]
        assign_experts([layer], landing.plan, self._dispatch)
        for expert, mlp in layer.experts.assigned():
            if expert in landing.arrived:
                self._unpack(mlp, landing.arrived[expert])
        self.plans[self._stage], self._landing = landing.plan, None

    def _exchanged(self, number: int, flow: Sequence[ChunkTransfer]) -> dict[int, torch.Tensor]:
        """Exchanges the state that a layer needs; returns arrived state by expert."""
        group, layer = exchange_group(), self.layers[number]
        rank, device = dist.get_rank(group), _device(layer)
        expert_of = {expert_operator(number, expert): expert for expert in range(len(layer.experts.holders))}
        local_experts, nbytes = dict(layer.experts.assigned()), self.sizes[number]
        arrived = {
            name: torch.empty(nbytes, dtype=torch.uint8, device=device)
            for name in dict.fromkeys(transfer.chunk.operator for transfer in flow if transfer.target == rank)
        }

        @functools.cache  # each copy of update counts to the device waits for the transfers before
        def state(name: str) -> Parts:
            return [arrived[name]] if name in arrived else self._parts(local_experts[expert_of[name]])

        send(flow, state, group, device)
        return {expert_of[name]: values for name, values in arrived.items()}

    def _parts(self, mlp: torch.nn.Module) -> Parts:
        """Returns views of an expert's master weights and moments, and a copy of its update counts."""
        return as_bytes([*self._tensors(mlp), self._steps(mlp)])

    @torch.no_grad()
    def _unpack(self, mlp: torch.nn.Module, state: torch.Tensor) -> None:
        tensors, steps = self._tensors(mlp), self._steps(mlp)
        parts = state.split([tensor.nbytes for tensor in (*tensors, steps)])
        for tensor, part in zip((*tensors, steps), parts, strict=True):
            tensor.view(torch.uint8).copy_(part)
        for parameter, step in zip(mlp.parameters(), steps.tolist(), strict=True):
            owned = self._slices[parameter]
            parameter.view(-1).copy_(owned.slots[MASTER])
            write_step(owned.counter, step)  # a fused Adam's group has no step before its first update

    def _tensors(self, mlp: torch.nn.Module) -> list[torch.Tensor]:
        slots = [self._slices[parameter].slots for parameter in mlp.parameters()]
        return [slots_of_parameter[name] for slots_of_parameter in slots for name in sorted(slots_of_parameter)]

    def _steps(self, mlp: torch.nn.Module) -> torch.Tensor:
        counters = [self._slices[parameter].counter for parameter in mlp.parameters()]
        device = next(mlp.parameters()).device
        return torch.tensor([int(counter.get("step", 0)) for counter in counters], dtype=torch.int64, device=device)


def _device(layer: ElasticLayer) -> torch.device:
    return next(layer.parameters()).device
