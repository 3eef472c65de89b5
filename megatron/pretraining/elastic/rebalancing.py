"""Rebalances replicas by load if this saves more time than the move takes."""

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
from megatron.pretraining.elastic.placement import Plans, PlansDiffer, fit, plans_for
from megatron.pretraining.elastic.replicas import Flow, Replicas, bytes_moved
from megatron.pretraining.elastic.state_transfer import Shards
from megatron.pretraining.engine.megatron import MegatronEngine
from megatron.pretraining.logging.records import expert_share
from megatron.pretraining.parts import Callback, TrainingRun
from moc.elastic.plan import Loads
from moc.elastic.transfers import count_new_replicas
from moc.events import EventLog
from moc.runtime.collectives import gather
from moc.runtime.device import synchronize_and_check
from moc.runtime.progress import progress

_BITS = 32  # of a hash in the commit all-reduce
_PROBE = 1 << 20  # bytes that each worker sends to each other worker to measure bandwidth


@dataclass(frozen=True)
class Prospect:
    """Benefit and cost of another plan.

    Attributes:
        saves_s: seconds saved per iteration.
        costs_s: seconds of the move.
        busiest: tokens of the busiest worker relative to the mean, now and with the plan, over all layers.
    """

    saves_s: float
    costs_s: float
    busiest: tuple[float, float]

    def pays(self, iterations: int) -> bool:
        """Returns whether the move has paid off after this number of iterations."""
        return self.saves_s * iterations > self.costs_s


@dataclass(frozen=True)
class Move:
    """A move that pays off.

    Attributes:
        plans: target plans.
        flow: transfers of this worker's stage, planned once.
        estimate: benefit and cost.
    """

    plans: Plans
    flow: Flow
    estimate: Prospect


def prospect(
    iteration_s: float, share: float, busiest: tuple[float, float], moved: int, second_per_byte: float
) -> Prospect:
    """Estimates the benefit and cost of a plan; pure.

    Args:
        iteration_s: seconds of an iteration now.
        share: share of experts in the operations of an iteration.
        busiest: as in :class:`Prospect`; the busiest worker determines the time of experts.
        moved: bytes that the busiest worker sends and receives.
        second_per_byte: seconds per byte.
    """
    current, planned = busiest
    balanced_s = iteration_s / (1.0 - share + share * current)
    return Prospect(balanced_s * share * (current - planned), moved * second_per_byte, busiest)


def imbalance(plans: Plans, loads: Loads) -> float:
    """Returns the tokens of the busiest worker divided by the mean, summed over layers; 1.0 without tokens."""
    busiest = mean = 0.0
    for plan in plans.values():
        for layer in plan.tables:
            work = plan.tokens_per_rank(layer, loads[layer])
            busiest, mean = busiest + float(work.max()), mean + float(work.mean())
    return busiest / mean if mean else 1.0


def hash_of(plans: Plans) -> int:
    """Returns a hash of 32 bits, which the commit all-reduce sums exactly."""
    return _hash_32_bits(json.dumps({stage: plans[stage].digest for stage in sorted(plans)}))


def _hash_32_bits(text: str) -> int:
    return xxhash.xxh32_intdigest(text.encode())


class Rebalancer(Callback):
    """Counts expert loads and compares plans in the commit all-reduce; moves replicas between iterations."""

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
        self._seconds, self._commits, self._committed_at = 0.0, 0, time.perf_counter()
        self._second_per_byte: float | None = None

    def close(self) -> None:
        """Stops counting."""
        self._tally.close()

    def contribution(self) -> dict:
        """Returns this worker's tokens, time since the last commit, plan and assignment."""
        seconds = time.perf_counter() - self._committed_at
        tokens = self._tally.take()
        return {
            "elastic_tokens": tokens["expert_tokens"],
            "elastic_sent": tokens["sent_tokens"],
            "elastic_seconds": seconds,
            "elastic_plan": float(hash_of(self._replicas.plans)),
            "elastic_cuts": self._cuts(),
        }

    def _cuts(self) -> torch.Tensor:
        """Returns the hash bits of the assignment in force, and 1, float64[stages * tensor-parallel ranks * 33].

        Workers with the same parameters contribute equal entries, all others 0. So the sums show whether each bit is
        set on all or none of them.
        """
        world = self._world
        entries = torch.zeros(world.pipeline_size, world.tensor_size, _BITS + 1, dtype=torch.float64)
        if self._shards is not None:
            digest = _hash_32_bits(self._shards.assignment.digest)
            bits = [float(digest >> bit & 1) for bit in range(_BITS)]
            entries[world.pipeline_rank, world.tensor_rank] = torch.tensor([*bits, 1.0], dtype=torch.float64)
        return entries.view(-1)

    def on_totals(self, totals: dict) -> None:
        """Adds up the load, and compares plans and assignments.

        Raises:
            PlansDiffer: on all workers.
        """
        if totals["elastic_plan"] != float(hash_of(self._replicas.plans)) * self._world.size:
            raise PlansDiffer(
                "workers hold experts by different plans, so their gradients do not belong together. Fix: restart the "
                "job from its last checkpoint, and report this as an error of the program"
            )
        bit_sums = torch.tensor(totals["elastic_cuts"], dtype=torch.float64).view(-1, _BITS + 1)
        if bool(((bit_sums != 0.0) & (bit_sums != bit_sums[:, -1:])).any()):
            raise PlansDiffer(
                "workers hold optimizer state by different cuts, so some updates would be lost. Fix: restart the job "
                "from its last checkpoint, and report this as an error of the program"
            )
        sums = {"expert_tokens": totals["elastic_tokens"], "sent_tokens": totals["elastic_sent"]}
        for layer, tokens in self._tally.by_layer(sums)[0].items():
            self._loads[layer] = [a + b for a, b in zip(self._loads.get(layer, [0] * len(tokens)), tokens, strict=True)]
        self._replicas.loads = self._loads
        self._committed_at = time.perf_counter()
        self._seconds += totals["elastic_seconds"] / self._world.size
        self._commits += 1

    def restore(self, moving: Callable[[], AbstractContextManager[None]]) -> None:
        """Moves replicas to the plans of the loaded snapshot, so that the run stays bit-identical; a collective call.

        Plans for other workers or slots are ignored.
        """
        loaded_plans = self._engine.loaded_plans
        if (
            loaded_plans is not None
            and loaded_plans != self._replicas.plans
            and fit(loaded_plans, self._replicas.plans)
        ):
            with moving():
                self._replicas.move_to(loaded_plans)
                self._engine.state.describe()

    def between_iterations(self, run: TrainingRun) -> None:
        """Moves replicas if this is due and pays off."""
        if self.due(run.position.iteration):
            self.rebalance(run)

    def rebalance(self, run: TrainingRun) -> None:
        """Moves replicas to match the load if this pays off; a collective call between two iterations."""
        planned = self.planned_move()
        if planned is not None:
            progress("save")
            with run.session.moving():
                self.move(run.position.iteration, planned, run.log.events)
            run.log.skip_time()

    def due(self, iteration: int) -> bool:
        """Returns whether to check for better plans after an iteration."""
        return bool(self._interval and self._commits) and iteration % self._interval == 0

    def planned_move(self) -> Move | None:
        """Returns the move for the load since the last check, if it pays off before the next; a collective call."""
        loads, seconds = self._loads, self._seconds / self._commits
        self._loads, self._seconds, self._commits = {}, 0.0, 0
        current = self._replicas.plans
        plans = plans_for(self._config, self._replicas.nodes, loads, current)
        if plans == current:
            return None
        flow = self._replicas.flow_to(plans)
        moved = max(gather(bytes_moved(flow)))
        busiest = imbalance(current, loads), imbalance(plans, loads)
        estimate = prospect(seconds, self._share, busiest, moved, self._measured_second_per_byte())
        return Move(plans, flow, estimate) if estimate.pays(self._interval) else None

    def move(self, iteration: int, planned: Move, events: EventLog) -> None:
        """Moves replicas; a collective call."""
        start, previous_plans = time.perf_counter(), dict(self._replicas.plans)
        plans, estimate = planned.plans, planned.estimate
        received_bytes = self._replicas.move_to(plans, planned.flow)
        self._engine.state.describe()
        experts = sum(count_new_replicas(previous_plans[stage], plan) for stage, plan in plans.items())
        self._committed_at = time.perf_counter()  # excludes the move from the iteration time
        events.write(
            "rebalance",
            iteration=iteration,
            experts=experts,
            bytes=sum(gather(received_bytes)),
            elapsed_s=round(time.perf_counter() - start, 6),
            busiest=round(estimate.busiest[0], 4),
            busiest_after=round(estimate.busiest[1], 4),
            saves_s=round(estimate.saves_s, 6),
        )

    def _measured_second_per_byte(self) -> float:
        """Returns the seconds per byte between workers, measured once; the slowest worker counts."""
        second_per_byte = self._second_per_byte
        if second_per_byte is None:
            group, size = exchange_group(), dist.get_world_size(exchange_group())
            packed = torch.zeros(size * _PROBE, dtype=torch.uint8, device=self._world.device)
            dist.all_to_all_single(torch.empty_like(packed), packed, group=group)  # the first call opens connections
            synchronize_and_check(self._world.device)
            start = time.perf_counter()
            dist.all_to_all_single(torch.empty_like(packed), packed, group=group)
            synchronize_and_check(self._world.device)
            second_per_byte = self._second_per_byte = max(gather((time.perf_counter() - start) / (2 * size * _PROBE)))
        return second_per_byte
