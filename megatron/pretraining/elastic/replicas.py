"""The replicas of experts on one worker: the plan in force, and moves of experts to another plan, in place.

A move goes layer by layer: new experts of a worker arrive in staging memory, all workers of the stage agree that
it has landed, and only then slots are filled.  A loss before that leaves the old plan of the layer in force; a
worker that misses the news, while others fill their slots, has what it needs to do so later
(:mod:`megatron.pretraining.elastic.members`).

Who sends what is planned for all layers at once (:func:`moc.elastic.boxes.expert_transfers`): new holders get a part of
an expert each, and pass it on to one another.  Staging memory is a layer's new experts, and the pieces under way
(:mod:`megatron.pretraining.elastic.sending`).
"""

from __future__ import annotations

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
from megatron.pretraining.elastic.layer import ElasticLayer
from megatron.pretraining.elastic.placing import NodesOfStages, Plans, adopt
from megatron.pretraining.elastic.sending import Parts, as_bytes, send
from megatron.pretraining.engine.owned import MASTER, owned_slices, write_step
from moc.elastic.boxes import Transfer, expert_operator, expert_transfers, experts_held
from moc.elastic.plan import Loads, Plan
from moc.faults import reach
from moc.runtime.agreement import settled_among


@dataclass(frozen=True)
class Landing:
    """What has arrived for a layer, by expert, and the plan with it."""

    layer: int
    plan: Plan
    arrived: Mapping[int, torch.Tensor]


Flow = Mapping[int, Sequence[Transfer]]
"""By layer, the transfers of a move."""


def bytes_moved(flow: Flow) -> int:
    """The most bytes of state that one worker sends and receives."""
    amounts: Counter[int] = Counter()
    for one in itertools.chain.from_iterable(flow.values()):
        amounts[one.source] += one.piece.nbytes
        amounts[one.target] += one.piece.nbytes
    return max(amounts.values(), default=0)


class Replicas:
    """The experts that this worker holds, of all elastic layers of its stage.

    Attributes:
        layers: by number.
        plans: in force, of all stages.
        nodes: that they are for.
        loads: tokens of experts in the last iterations, as voted; empty if none are known.
        wanted: plans to which experts are yet to move, since the members have changed; None if they are in force.
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
        self.wanted: Plans | None = None
        self._stage, self._dispatch = parallel_state.get_pipeline_model_parallel_rank(), dispatch
        self._optimizer = optimizer
        self._landing: Landing | None = None
        of_experts = (owned for owned in owned_slices(optimizer) if not getattr(owned.parameter, "allreduce", True))
        self._slices = {owned.parameter: owned for owned in of_experts}
        count_once(self.layers.values(), optimizer)

    def move_to(self, plans: Plans, flow: Flow | None = None) -> int:
        """Moves experts to other plans, between two iterations; a collective call of each stage.

        Args:
            plans: of all stages.
            flow: :meth:`flow_to` them; planned here without it.

        Returns:
            Bytes that arrived at this worker.
        """
        taken = 0
        flow = self.flow_to(plans) if flow is None else flow
        for layer in sorted(self.layers):
            before, after = self.plans[self._stage], plans[self._stage]
            mixed = replace(after, tables={**before.tables, layer: after.tables[layer]})
            landing = Landing(layer, mixed, self._exchanged(layer, flow[layer]))
            reach("rebalancing")
            self._landing = landing
            settled_among(exchange_group(), _device(self.layers[layer]))
            reach("landed")
            self._land(landing)
            taken += sum(state.nbytes for state in landing.arrived.values())
        self.plans, self.wanted = dict(plans), None
        count_once(self.layers.values(), self._optimizer)
        return taken

    @property
    def awaited(self) -> Plan | None:
        """The plan that a move leads to, while this worker has got its part and may not know that all have; or None."""
        return self._landing and self._landing.plan

    def land(self, plan: Plan) -> None:
        """Fills slots with what has arrived, once it is known that all had got their parts.

        Args:
            plan: :attr:`awaited`, as it is for the members that are left.
        """
        assert self._landing is not None  # it is awaited
        self._land(replace(self._landing, plan=plan))

    def take(self, plans: Plans, nodes: NodesOfStages) -> None:
        """Has other plans in force, and moves no state: others have it, or it is where the plans say already."""
        self.plans, self.nodes, self._landing = dict(plans), nodes, None
        if self.layers:
            adopt(self.layers.values(), self.plans[self._stage], self._dispatch)
        count_once(self.layers.values(), self._optimizer)

    @property
    def sizes(self) -> dict[int, int]:
        """By layer, bytes of the state of an expert."""
        of_layer = {number: self._parts(layer.experts.local_experts[0]) for number, layer in self.layers.items()}
        return {number: sum(map(len, parts)) for number, parts in of_layer.items()}

    def flow_to(self, plans: Plans) -> Flow:
        """The transfers that lead from the plans in force to other plans."""
        if not self.layers:
            return {}
        return expert_transfers(experts_held(self.plans[self._stage]), plans[self._stage], self.sizes)

    def _land(self, landing: Landing) -> None:
        """Fills the slots of a layer with what has arrived."""
        layer = self.layers[landing.layer]
        adopt([layer], landing.plan, self._dispatch)
        for expert, mlp in layer.experts.held():
            if expert in landing.arrived:
                self._unpack(mlp, landing.arrived[expert])
        self.plans[self._stage], self._landing = landing.plan, None

    def _exchanged(self, number: int, flow: Sequence[Transfer]) -> dict[int, torch.Tensor]:
        """Sends and receives what a layer needs; returns what has arrived, by expert."""
        group, layer = exchange_group(), self.layers[number]
        rank, device = dist.get_rank(group), _device(layer)
        named = {expert_operator(number, expert): expert for expert in range(len(layer.experts.holders))}
        held = dict(layer.experts.held())
        arrived = {
            name: torch.empty(self.sizes[number], dtype=torch.uint8, device=device)
            for name in dict.fromkeys(one.piece.operator for one in flow if one.target == rank)
        }

        def state(name: str) -> Parts:
            return [arrived[name]] if name in arrived else self._parts(held[named[name]])

        send(flow, state, group, device)
        return {named[name]: values for name, values in arrived.items()}

    def _parts(self, mlp: torch.nn.Module) -> Parts:
        """Master weights and moments of an expert in their memory, and a copy of its counts of updates."""
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
            write_step(owned.counter, step)  # a fused Adam's group has none before its first update

    def _tensors(self, mlp: torch.nn.Module) -> list[torch.Tensor]:
        slots = [self._slices[parameter].slots for parameter in mlp.parameters()]
        return [of_parameter[name] for of_parameter in slots for name in sorted(of_parameter)]

    def _steps(self, mlp: torch.nn.Module) -> torch.Tensor:
        counters = [self._slices[parameter].counter for parameter in mlp.parameters()]
        device = next(mlp.parameters()).device
        return torch.tensor([int(counter.get("step", 0)) for counter in counters], dtype=torch.int64, device=device)


def _device(layer: ElasticLayer) -> torch.device:
    return next(layer.parameters()).device
