"""Rebalancing: replicas follow the load, if the time that this saves exceeds the time that moving them takes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch
import torch.distributed as dist
import xxhash

from megatron.pretraining.config import Config
from megatron.pretraining.elastic.groups import exchange_group
from megatron.pretraining.elastic.placing import Plan, plan_for
from megatron.pretraining.elastic.replicas import Replicas, moves
from megatron.pretraining.engine.megatron import MegatronEngine
from megatron.pretraining.logging.flops import expert_share
from moc.elastic.dispatch import level
from moc.events import EventLog
from moc.runtime.agreement import gather
from moc.session.engine import VoteParticipant

Loads = Mapping[int, Sequence[int]]
"""By layer and expert, tokens."""
_PROBE = 1 << 20  # bytes that each worker sends to each other one, to measure how fast state travels


class PlansDiffer(RuntimeError):
    """Workers hold experts by different plans."""


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


def imbalance(plan: Plan, loads: Loads, size: int) -> float:
    """Tokens of the busiest of ``size`` workers by those of the mean, summed over layers; 1.0 without tokens."""
    most = total = 0.0
    for layer, tokens in loads.items():
        capacities = level(numpy.array(tokens, dtype=numpy.int64), numpy.array(plan[layer]))
        most += float(capacities.sum(axis=0).max())
        total += sum(tokens)
    return most * size / total if total else 1.0


def hash_of(plan: Plan) -> int:
    """A hash of 32 bits, of which a vote adds up exactly."""
    return xxhash.xxh32_intdigest(repr(sorted(plan.items())).encode())


class Rebalancer(VoteParticipant):
    """Counts the load of experts in the vote, compares plans there, and moves replicas between iterations."""

    def __init__(self, config: Config, engine: MegatronEngine, replicas: Replicas, vocab_size: int):
        self._config, self._world, self._state, self._replicas = config, engine.world, engine.state, replicas
        self._tally = engine.router_tally(list(replicas.plan), with_probabilities=False)
        self._share = expert_share(config, vocab_size)
        self._interval = config.elastic.elastic_rebalance_interval
        self._loads: dict[int, list[int]] = {}
        self._seconds, self._votes, self._voted_at = 0.0, 0, time.perf_counter()
        self._second_per_byte: float | None = None

    def close(self) -> None:
        """Stops counting."""
        self._tally.close()

    def ballot(self) -> dict:
        """This worker's tokens, time since the last vote, and plan."""
        seconds = time.perf_counter() - self._voted_at
        tokens = self._tally.take()
        return {
            "elastic_tokens": tokens["expert_tokens"],
            "elastic_sent": tokens["sent_tokens"],
            "elastic_seconds": seconds,
            "elastic_plan": float(hash_of(self._replicas.plan)),
        }

    def on_vote(self, tally: dict) -> None:
        """Adds up the load.

        Raises:
            PlansDiffer: on all workers.
        """
        if tally["elastic_plan"] != float(hash_of(self._replicas.plan)) * self._world.size:
            raise PlansDiffer(
                "workers hold experts by different plans, so their gradients do not belong together: restart the job "
                "from its last checkpoint, and report this as an error of the program"
            )
        told = {"expert_tokens": tally["elastic_tokens"], "sent_tokens": tally["elastic_sent"]}
        for layer, tokens in self._tally.by_layer(told)[0].items():
            self._loads[layer] = [a + b for a, b in zip(self._loads.get(layer, [0] * len(tokens)), tokens, strict=True)]
        self._voted_at = time.perf_counter()
        self._seconds += tally["elastic_seconds"] / self._world.size
        self._votes += 1

    def wanted(self, iteration: int) -> tuple[Plan, Prospect] | None:
        """The plan to move to after an iteration, if one is due and pays; a collective call when it is due."""
        if not self._interval or iteration % self._interval or not self._votes:
            return None
        loads, seconds = self._loads, self._seconds / self._votes
        self._loads, self._seconds, self._votes = {}, 0.0, 0
        plan, now = plan_for(self._config, self._world.size, loads), self._replicas.plan
        if plan == now:
            return None
        size = dist.get_world_size(exchange_group())
        moved = max(gather(self._replicas.bytes_moved(plan)))
        busiest = imbalance(now, loads, size), imbalance(plan, loads, size)
        found = prospect(seconds, self._share, busiest, moved, self._speed())
        return (plan, found) if found.pays(self._interval) else None

    def move(self, iteration: int, plan: Plan, found: Prospect, events: EventLog) -> None:
        """Moves replicas; a collective call."""
        begun, before = time.perf_counter(), dict(self._replicas.plan)
        taken = self._replicas.move_to(plan)
        self._state.describe()
        experts = sum(len(moves(before[layer], plan[layer])) for layer in plan)
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
        if self._second_per_byte is None:
            group, size = exchange_group(), dist.get_world_size(exchange_group())
            packed = torch.zeros(size * _PROBE, dtype=torch.uint8, device=self._world.device)
            dist.all_to_all_single(torch.empty_like(packed), packed, group=group)  # the first one opens connections
            begun = time.perf_counter()
            dist.all_to_all_single(torch.empty_like(packed), packed, group=group)
            torch.cuda.synchronize() if self._world.device.type == "cuda" else None
            self._second_per_byte = max(gather((time.perf_counter() - begun) / (2 * size * _PROBE)))
        return self._second_per_byte
