"""The replicas of experts on one worker: the plan in force, and moves of experts to another plan, in place.

A move goes layer by layer: what a worker is to hold anew arrives beside its slots (staging), all workers of the stage
tell that it has landed, and only then slots are filled.  A loss before that leaves the old plan of the layer whole; a
worker that misses the news, while others fill their slots, has what it needs to do so later
(:mod:`megatron.pretraining.elastic.members`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer

from megatron.pretraining.elastic.gradients import count_once
from megatron.pretraining.elastic.groups import exchange_group
from megatron.pretraining.elastic.layer import ElasticLayer
from megatron.pretraining.elastic.placing import NodesOfStages, Plans, adopt
from megatron.pretraining.engine.owned import MASTER, owned_slices, write_step
from moc.elastic.plan import Loads, Plan
from moc.faults import reach


class Move(NamedTuple):
    """A copy of an expert's state, from one rank of the exchange group to another."""

    expert: int
    source: int
    target: int


def moves(before: Plan, after: Plan, layer: int) -> list[Move]:
    """The copies that lead from one placement of a layer to another; the work is spread over all old holders."""
    busy, found = Counter(), []
    for expert in range(after.experts):
        old = before.holders(layer, expert)
        for target in sorted(set(after.holders(layer, expert)) - set(old)):
            source = min(old, key=lambda rank: (busy[rank], rank))
            busy[source] += 1
            found.append(Move(expert, source, target))
    return found


@dataclass(frozen=True)
class Landing:
    """What has arrived for a layer, by expert, and the plan with it."""

    layer: int
    plan: Plan
    arrived: Mapping[int, torch.Tensor]


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

    def move_to(self, plans: Plans) -> int:
        """Moves experts to other plans, between two iterations; a collective call of each stage.

        Returns:
            Bytes that arrived at this worker.
        """
        taken = 0
        for layer in sorted(self.layers):
            before, after = self.plans[self._stage], plans[self._stage]
            mixed = replace(after, tables={**before.tables, layer: after.tables[layer]})
            landing = Landing(layer, mixed, self._exchanged(layer, before, after))
            reach("rebalancing")
            self._landing = landing
            landed = torch.zeros(1, device=_device(self.layers[layer]))
            dist.all_reduce(landed, group=exchange_group())
            landed.item()  # on a device, the host waits here
            reach("landed")
            self._land(landing)
            taken += sum(state.nbytes for state in landing.arrived.values())
        self.plans, self.wanted = dict(plans), None
        count_once(self.layers.values(), self._optimizer)
        return taken

    @property
    def awaited(self) -> Plan | None:
        """The plan of this stage with what has arrived here, and is not known to have landed everywhere; or None."""
        return self._landing and self._landing.plan

    def land(self, plan: Plan) -> None:
        """Fills slots with what has arrived, as a plan has it that may be for other members by now."""
        assert self._landing is not None  # it is awaited
        self._land(replace(self._landing, plan=plan))

    def take(self, plans: Plans, nodes: NodesOfStages) -> None:
        """Takes over plans, but no state: those of others, or of other members."""
        self.plans, self.nodes, self._landing = dict(plans), nodes, None
        if self.layers:
            adopt(self.layers.values(), self.plans[self._stage], self._dispatch)
        count_once(self.layers.values(), self._optimizer)

    def bytes_moved(self, plans: Plans) -> int:
        """The most bytes of state that one worker of this stage sends and receives on the way to other plans."""
        amounts: Counter[int] = Counter()
        for number, layer in self.layers.items():
            size = self._packed(layer.experts.local_experts[0]).nbytes
            for move in moves(self.plans[self._stage], plans[self._stage], number):
                amounts[move.source] += size
                amounts[move.target] += size
        return max(amounts.values(), default=0)

    def _land(self, landing: Landing) -> None:
        """Fills the slots of a layer with what has arrived."""
        layer = self.layers[landing.layer]
        adopt([layer], landing.plan, self._dispatch)
        for expert, mlp in layer.experts.held():
            if expert in landing.arrived:
                self._unpack(mlp, landing.arrived[expert])
        self.plans[self._stage], self._landing = landing.plan, None

    def _exchanged(self, number: int, before: Plan, after: Plan) -> dict[int, torch.Tensor]:
        """Sends and receives what a layer needs; returns what has arrived, by expert."""
        group, layer, flow = exchange_group(), self.layers[number], moves(before, after, number)
        rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
        held = dict(layer.experts.held())
        out = [[move.expert for move in flow if (move.source, move.target) == (rank, other)] for other in ranks]
        new = [[move.expert for move in flow if (move.source, move.target) == (other, rank)] for other in ranks]
        size = self._packed(layer.experts.local_experts[0]).nbytes  # of each expert
        packed = [self._packed(held[expert]) for of_rank in out for expert in of_rank]
        device, experts = _device(layer), [expert for of_rank in new for expert in of_rank]
        outgoing = torch.cat(packed) if packed else torch.empty(0, dtype=torch.uint8, device=device)
        arrived = torch.empty(size * len(experts), dtype=torch.uint8, device=device)
        sizes = [size * len(of_rank) for of_rank in new], [size * len(of_rank) for of_rank in out]
        dist.all_to_all_single(arrived, outgoing, *sizes, group=group)
        return dict(zip(experts, arrived.view(len(experts), size), strict=True))

    def _packed(self, mlp: torch.nn.Module) -> torch.Tensor:
        """Master weights, moments and counts of updates of an expert, as bytes."""
        return torch.cat([tensor.view(torch.uint8) for tensor in (*self._tensors(mlp), self._steps(mlp))])

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
