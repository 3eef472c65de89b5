"""Rebalancing: replicas follow the load, if the time that this saves exceeds the time that moving them takes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash

from megatron.pretraining.config import Config
from megatron.pretraining.elastic.groups import exchange_group
from megatron.pretraining.elastic.placing import Plans, PlansDiffer, fit, plans_for
from megatron.pretraining.elastic.replicas import Flow, Replicas, bytes_moved
from megatron.pretraining.elastic.shards import Shards
from megatron.pretraining.engine.megatron import MegatronEngine
from megatron.pretraining.logging.flops import expert_share
from moc.elastic.boxes import copies
from moc.elastic.plan import Loads
from moc.events import EventLog
from moc.runtime.agreement import gather
from moc.runtime.results import settled
from moc.session.engine import VoteParticipant

_BITS = 32  # of a hash in a vote
_PROBE = 1 << 20  # bytes that each worker sends to each other one, to measure how fast state travels


@dataclass(frozen=True)
class Prospect:
    """What another plan would bring.

    Attributes:
        saves_s: seconds of each iteration.
        costs_s: seconds of the move.
        busiest: tokens of the busiest worker by those of the mean, now and then, over all layers.
    """

    saves_s: float
    costs_s: float
    busiest: tuple[float, float]

    def pays(self, iterations: int) -> bool:
        """Whether it has paid after so many iterations."""
        return self.saves_s * iterations > self.costs_s


@dataclass(frozen=True)
class Move:
    """A move that pays.

    Attributes:
        plans: to which experts move.
        flow: the transfers of this worker's stage, planned once.
        found: what the move brings.
    """

    plans: Plans
    flow: Flow
    found: Prospect


def prospect(
    iteration_s: float, share: float, busiest: tuple[float, float], moved: int, second_per_byte: float
) -> Prospect:
    """Weighs a plan; pure.

    Args:
        iteration_s: seconds of an iteration now.
        share: of an iteration's operations that experts do.
        busiest: as in :class:`Prospect`; experts take as long as on the busiest worker.
        moved: bytes that the busiest worker sends and receives.
        second_per_byte: how long a byte takes.
    """
    now, then = busiest
    balanced_s = iteration_s / (1.0 - share + share * now)
    return Prospect(balanced_s * share * (now - then), moved * second_per_byte, busiest)


def imbalance(plans: Plans, loads: Loads) -> float:
    """Tokens of the busiest worker by those of the mean, summed over layers; 1.0 without tokens."""
    most = mean = 0.0
    for plan in plans.values():
        for layer in plan.tables:
            work = plan.work(layer, loads[layer])
            most, mean = most + float(work.max()), mean + float(work.mean())
    return most / mean if mean else 1.0


def hash_of(plans: Plans) -> int:
    """A hash of 32 bits, of which a vote adds up exactly."""
    return _short(json.dumps({stage: plans[stage].digest for stage in sorted(plans)}))


def _short(text: str) -> int:
    return xxhash.xxh32_intdigest(text.encode())


class Rebalancer(VoteParticipant):
    """Counts the load of experts in the vote, compares plans and cuts there, and moves replicas between iterations."""

    def __init__(
        self, config: Config, engine: MegatronEngine, replicas: Replicas, shards: Shards | None, vocab_size: int
    ):
        self._config, self._world, self._engine = config, engine.world, engine
        self._replicas, self._shards = replicas, shards
        self._tally = engine.router_tally(
            sorted(layer for plan in replicas.plans.values() for layer in plan.tables), with_probabilities=False
        )
        self._share = expert_share(config, vocab_size)
        self._interval = config.elastic.elastic_rebalance_interval
        self._loads: dict[int, list[int]] = {}
        self._seconds, self._votes, self._voted_at = 0.0, 0, time.perf_counter()
        self._second_per_byte: float | None = None

    def close(self) -> None:
        """Stops counting."""
        self._tally.close()

    def ballot(self) -> dict:
        """This worker's tokens, time since the last vote, plan, and cut."""
        seconds = time.perf_counter() - self._voted_at
        tokens = self._tally.take()
        return {
            "elastic_tokens": tokens["expert_tokens"],
            "elastic_sent": tokens["sent_tokens"],
            "elastic_seconds": seconds,
            "elastic_plan": float(hash_of(self._replicas.plans)),
            "elastic_cuts": self._cuts(),
        }

    def _cuts(self) -> torch.Tensor:
        """Bits of a hash of the cut in force, and 1, float64[stages * tensor-parallel ranks * 33].

        Cuts are alike on workers with the same parameters, and 0 for all others: so all workers see in the sums
        whether each bit is that of all or of none.
        """
        world = self._world
        found = torch.zeros(world.pipeline_size, world.tensor_size, _BITS + 1, dtype=torch.float64)
        if self._shards is not None:
            told = _short(self._shards.cut.digest)
            bits = [float(told >> bit & 1) for bit in range(_BITS)]
            found[world.pipeline_rank, world.tensor_rank] = torch.tensor([*bits, 1.0], dtype=torch.float64)
        return found.view(-1)

    def on_vote(self, tally: dict) -> None:
        """Adds up the load.

        Raises:
            PlansDiffer: on all workers.
        """
        if tally["elastic_plan"] != float(hash_of(self._replicas.plans)) * self._world.size:
            raise PlansDiffer(
                "workers hold experts by different plans, so their gradients do not belong together. Fix: restart the "
                "job from its last checkpoint, and report this as an error of the program"
            )
        counts = torch.tensor(tally["elastic_cuts"], dtype=torch.float64).view(-1, _BITS + 1)
        if bool(((counts != 0.0) & (counts != counts[:, -1:])).any()):
            raise PlansDiffer(
                "workers hold optimizer state by different cuts, so some updates would be lost. Fix: restart the job "
                "from its last checkpoint, and report this as an error of the program"
            )
        told = {"expert_tokens": tally["elastic_tokens"], "sent_tokens": tally["elastic_sent"]}
        for layer, tokens in self._tally.by_layer(told)[0].items():
            self._loads[layer] = [a + b for a, b in zip(self._loads.get(layer, [0] * len(tokens)), tokens, strict=True)]
        self._replicas.loads = self._loads
        self._voted_at = time.perf_counter()
        self._seconds += tally["elastic_seconds"] / self._world.size
        self._votes += 1

    def restore(self, moving: Callable[[], AbstractContextManager[None]]) -> None:
        """Moves replicas to where they were in the loaded snapshot, by which the run goes on bit by bit; collective.

        Those of a run with other workers or slots stay where they are.
        """
        placed = self._engine.placed
        if placed is not None and placed != self._replicas.plans and fit(placed, self._replicas.plans):
            with moving():
                self._replicas.move_to(placed)
                self._engine.state.describe()

    def due(self, iteration: int) -> bool:
        """Whether to look for other plans after an iteration."""
        return bool(self._interval and self._votes) and iteration % self._interval == 0

    def wanted(self) -> Move | None:
        """The move to the plans for the load since the last look, if it pays until the next one; a collective call."""
        loads, seconds = self._loads, self._seconds / self._votes
        self._loads, self._seconds, self._votes = {}, 0.0, 0
        now = self._replicas.plans
        plans = plans_for(self._config, self._replicas.nodes, loads, now)
        if plans == now:
            return None
        flow = self._replicas.flow_to(plans)
        moved = max(gather(bytes_moved(flow)))
        busiest = imbalance(now, loads), imbalance(plans, loads)
        found = prospect(seconds, self._share, busiest, moved, self._speed())
        return Move(plans, flow, found) if found.pays(self._interval) else None

    def move(self, iteration: int, wanted: Move, events: EventLog) -> None:
        """Moves replicas; a collective call."""
        begun, before = time.perf_counter(), dict(self._replicas.plans)
        plans, found = wanted.plans, wanted.found
        taken = self._replicas.move_to(plans, wanted.flow)
        self._engine.state.describe()
        experts = sum(copies(before[stage], plan) for stage, plan in plans.items())
        self._voted_at = time.perf_counter()  # an iteration's time has no move in it
        events.write(
            "rebalance",
            iteration=iteration,
            experts=experts,
            bytes=sum(gather(taken)),
            elapsed_s=round(time.perf_counter() - begun, 6),
            busiest=round(found.busiest[0], 4),
            busiest_after=round(found.busiest[1], 4),
            saves_s=round(found.saves_s, 6),
        )

    def _speed(self) -> float:
        """Seconds per byte between workers, measured once; the slowest worker counts."""
        speed = self._second_per_byte
        if speed is None:
            group, size = exchange_group(), dist.get_world_size(exchange_group())
            packed = torch.zeros(size * _PROBE, dtype=torch.uint8, device=self._world.device)
            dist.all_to_all_single(torch.empty_like(packed), packed, group=group)  # the first one opens connections
            settled(self._world.device)
            begun = time.perf_counter()
            dist.all_to_all_single(torch.empty_like(packed), packed, group=group)
            settled(self._world.device)
            speed = self._second_per_byte = max(gather((time.perf_counter() - begun) / (2 * size * _PROBE)))
        return speed
