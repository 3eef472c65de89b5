"""The replicas of experts on one worker: the plan in force, and moves of experts to another plan, in place.

A move goes layer by layer: what a worker is to hold anew arrives beside its slots (staging), all workers of the stage
tell that it has landed, and only then slots are filled.  A loss before that leaves the old plan of the layer whole; a
worker that misses the news, while others fill their slots, has what it needs to do so later (:meth:`Replicas.settle`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.mlp import MLP

from megatron.pretraining.elastic.gradients import count_once
from megatron.pretraining.elastic.groups import exchange_group
from megatron.pretraining.elastic.layer import ElasticLayer
from megatron.pretraining.elastic.placing import Plan, Table, adopt, ranks_of
from megatron.pretraining.engine.owned import MASTER, owned_slices, write_step
from moc.faults import reach
from moc.runtime.agreement import gather


class Move(NamedTuple):
    """A copy of an expert's state, from one rank of the exchange group to another."""

    expert: int
    source: int
    target: int


def moves(before: Table, after: Table) -> list[Move]:
    """The copies that lead from one placement of a layer to another; the work is spread over all old holders."""
    busy, found = Counter(), []
    for expert, (old, new) in enumerate(zip(before, after, strict=True)):
        for target in (rank for rank in ranks_of(new) if not old[rank]):
            source = min(ranks_of(old), key=lambda rank: (busy[rank], rank))
            busy[source] += 1
            found.append(Move(expert, source, target))
    return found


@dataclass(frozen=True)
class Landing:
    """What has arrived for a layer, by expert, and the placement that it belongs to."""

    layer: int
    table: Table
    arrived: Mapping[int, torch.Tensor]


class Replicas:
    """The experts that this worker holds, of all elastic layers of its stage.

    Attributes:
        layers: by number.
        plan: in force, of all stages.
    """

    def __init__(self, layers: Iterable[ElasticLayer], optimizer: MegatronOptimizer, plan: Plan, dispatch: str):
        self.layers = {layer.layer: layer for layer in layers}
        self.plan: dict[int, Table] = dict(plan)
        self._optimizer, self._dispatch = optimizer, dispatch
        self._landing: Landing | None = None
        self._slices = {owned.parameter: owned for owned in owned_slices(optimizer)}
        count_once(self.layers.values(), optimizer)

    def move_to(self, plan: Plan) -> int:
        """Moves experts to another plan, between two iterations; a collective call of each stage.

        Returns:
            Bytes that arrived at this worker.
        """
        taken = 0
        for number, table in plan.items():
            if number in self.layers and table != self.plan[number]:
                landing = Landing(number, table, self._exchanged(number, table))
                reach("rebalancing")
                self._landing = landing
                dist.all_reduce(torch.zeros(1, device=_device(self.layers[number])), group=exchange_group())  # landed
                self._land()
                taken += sum(state.nbytes for state in landing.arrived.values())
            self.plan[number] = table
        count_once(self.layers.values(), self._optimizer)
        return taken

    def settle(self, trained: bool) -> None:
        """Agrees on the plan after a loss; a collective call of all workers.

        A layer whose move has landed on one worker lands on all.  Workers that have not ``trained`` take over the plan
        of the others, not the state.
        """
        waits = None if self._landing is None else (self._landing.layer, self._landing.table)
        told = gather(({n: self.plan[n] for n in self.layers} if trained else {}, waits))
        landings = dict(waits for _, waits in told if waits is not None)
        for number in self.plan:
            found = {plan[number] for plan, _ in told if number in plan}
            decided = landings[number] if landings.get(number) in found else next(iter(found), self.plan[number])
            if self._landing is not None and waits == (number, decided) and decided != self.plan[number]:
                self._land()
            self.plan[number] = decided
        self._landing = None
        adopt(self.layers.values(), self.plan, self._dispatch)
        count_once(self.layers.values(), self._optimizer)

    def bytes_moved(self, plan: Plan) -> int:
        """The most bytes of state that one worker of this stage sends or receives on the way to a plan."""
        amounts: Counter[int] = Counter()
        for number, layer in self.layers.items():
            size = self._packed(layer.experts.local_experts[0]).nbytes
            for move in moves(self.plan[number], plan[number]):
                amounts[move.source] += size
                amounts[move.target] += size
        return max(amounts.values(), default=0)

    def _land(self) -> None:
        """Fills the slots of a layer with what has arrived."""
        assert self._landing is not None  # set by the caller
        layer, landing = self.layers[self._landing.layer], self._landing
        adopt([layer], {landing.layer: landing.table}, self._dispatch)
        for expert, mlp in layer.experts.held():
            if expert in landing.arrived:
                self._unpack(mlp, landing.arrived[expert])
        self.plan[landing.layer], self._landing = landing.table, None

    def _exchanged(self, number: int, table: Table) -> dict[int, torch.Tensor]:
        group, layer, flow = exchange_group(), self.layers[number], moves(self.plan[number], table)
        rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
        held = dict(layer.experts.held())
        out = [[move.expert for move in flow if (move.source, move.target) == (rank, other)] for other in ranks]
        new = [[move.expert for move in flow if (move.source, move.target) == (other, rank)] for other in ranks]
        size = self._packed(layer.experts.local_experts[0]).nbytes  # of each expert
        packed = [self._packed(held[expert]) for of_rank in out for expert in of_rank]
        device = _device(layer)
        outgoing = torch.cat(packed) if packed else torch.empty(0, dtype=torch.uint8, device=device)
        arrived = torch.empty(size * sum(map(len, new)), dtype=torch.uint8, device=device)
        sizes = [size * len(of_rank) for of_rank in new], [size * len(of_rank) for of_rank in out]
        dist.all_to_all_single(arrived, outgoing, *sizes, group=group)
        return dict(zip([e for of_rank in new for e in of_rank], arrived.split(size), strict=True)) if size else {}

    def _packed(self, mlp: MLP) -> torch.Tensor:
        """Master weights, moments and counts of updates of an expert, as bytes."""
        return torch.cat([tensor.view(torch.uint8) for tensor in (*self._tensors(mlp), self._steps(mlp))])

    @torch.no_grad()
    def _unpack(self, mlp: MLP, state: torch.Tensor) -> None:
        tensors, steps = self._tensors(mlp), self._steps(mlp)
        parts = state.split([tensor.nbytes for tensor in (*tensors, steps)])
        for tensor, part in zip((*tensors, steps), parts, strict=True):
            tensor.view(torch.uint8).copy_(part)
        for parameter, step in zip(mlp.parameters(), steps.tolist(), strict=True):
            owned = self._slices[parameter]
            parameter.view(-1).copy_(owned.slots[MASTER])
            if "step" in owned.counter:
                write_step(owned.counter, step)

    def _tensors(self, mlp: MLP) -> list[torch.Tensor]:
        slots = [self._slices[parameter].slots for parameter in mlp.parameters()]
        return [of_parameter[name] for of_parameter in slots for name in sorted(of_parameter)]

    def _steps(self, mlp: MLP) -> torch.Tensor:
        counters = [self._slices[parameter].counter for parameter in mlp.parameters()]
        device = next(mlp.parameters()).device
        return torch.tensor([int(counter.get("step", 0)) for counter in counters], dtype=torch.int64, device=device)


def _device(layer: ElasticLayer) -> torch.device:
    return next(layer.parameters()).device
