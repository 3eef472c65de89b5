"""Moves of elastic state on a device that lies, with failures at random moments: see :mod:`tests.lying`."""

from __future__ import annotations

import os
import random
import threading
import time
import zlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron.pretraining.elastic import membership
from megatron.pretraining.elastic.placement import no_loads, plans_for
from megatron.pretraining.elastic.state import ElasticState
from megatron.pretraining.engine.owned import MASTER, write_step
from megatron.pretraining.entry import elastic
from megatron.pretraining.parts import WorkerParts
from megatron.pretraining.process import initialize
from megatron.pretraining.process.phases import Phases
from megatron.pretraining.process.stopping import StopRequests
from moc.elastic.transfers import ShardAssignment
from moc.runtime.job import Job
from moc.state.operators import OwnedSlice
from tests.integration.group_operations import outcome, store_at
from tests.integration.lying_bodies import begin_together, lying_groups
from tests.integration.own_program import program_of

JUNK, JUNK_STEPS = 7e7, 999
LATE_S = 0.05  # most seconds until a worker knows of a loss
COUNTED = ("wrong", "cut_off", "landed")


class State:
    """The experts and shards that a worker has in use, with contents that depend on what they are."""

    def __init__(self, parts: WorkerParts):
        state = parts.moving
        assert isinstance(state, ElasticState) and state.shards is not None
        self.config, self.replicas, self.shards = parts.config, state.replicas, state.shards
        self._gather_weights = parts.optimizer.gather_weights

    def slices(self) -> Iterator[tuple[str, OwnedSlice]]:
        """What this worker has in use, by name."""
        for number, layer in self.replicas.layers.items():
            for expert, mlp in layer.experts.assigned():
                for place, parameter in enumerate(mlp.parameters()):
                    yield f"layer {number} expert {expert} parameter {place}", self.replicas._slices[parameter]
        for number, owned in self.shards._slices():
            yield f"block {number}", owned

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights, master weights and moments, by name; weights have the values of their master weights."""
        for name, owned in self.slices():
            for slot, values in owned.slots.items():
                yield f"{name} {slot}", values
            yield f"{name} {MASTER}", owned.parameter.view(-1)[owned.start : owned.stop]

    @torch.no_grad()
    def fill(self, junk: bool = False) -> None:
        """Writes what everything is to be, or what nothing may be."""
        for name, values in self.tensors():
            values.fill_(JUNK if junk else _value(name))
        for name, owned in self.slices():
            write_step(owned.counter, JUNK_STEPS if junk else _steps(name))

    def wrong(self) -> int:
        """Bytes that are not what they are to be."""
        differing = sum(values.itemsize * int((values != _value(name)).sum()) for name, values in self.tensors())
        return differing + sum(8 * (int(owned.counter["step"]) != _steps(name)) for name, owned in self.slices())

    def move(self, chance: random.Random) -> None:
        """Gathers weights, moves shards to other holders, and experts to plans for another load; alike on all."""
        self._gather_weights()
        now, size, turn = self.shards.assignment, dist.get_world_size(), chance.randrange(1, dist.get_world_size())
        turned = tuple(tuple((rank + turn) % size for rank in of) for of in now.holders)
        loads = {layer: [chance.choice((1, 5, 50)) for _ in of] for layer, of in no_loads(self.config).items()}
        plans = plans_for(self.config, self.replicas.nodes, loads, self.replicas.plans)
        self.shards.move_to(ShardAssignment(now.members, now.ranks, turned))
        self.replicas.move_to(plans)

    def settle(self, trained: bool) -> None:
        """Agrees with the others on what is in use, and where something has landed."""
        assert not membership.settle(self.config, self.replicas, self.shards, trained).lost

    @property
    def placed(self) -> tuple:
        """Who holds what, by this worker."""
        return self.shards.assignment.digest, *(plan.digest for plan in self.replicas.plans.values())


def _value(name: str) -> float:
    return float(zlib.crc32(name.encode()) % 4093)


def _steps(name: str) -> int:
    return zlib.crc32(name.rpartition(" parameter")[0].encode() or name.encode()) % 97


def moves(port: int, flags: dict, rounds: int, seed: int) -> dict[str, int]:
    """Moves state again and again; in each round a worker is lost at a random moment, and the others know of it later.

    Returns:
        ``wrong``, bytes in use on surviving workers that are not what they are to be; and how many moves ``cut_off``
        were noticed by this worker, and those of them in which something had ``landed``.
    """
    rank = int(os.environ["RANK"])
    groups, store, told = lying_groups(seed=seed), store_at(port), dict.fromkeys(COUNTED, 0)
    state, lasted = State(_built(flags, groups, store)), 0.05
    state.fill()
    for number in range(1, rounds + 1):
        chance = random.Random(f"{seed} {number}")
        victim, moment = chance.randrange(dist.get_world_size()), chance.random()
        delays = [chance.choice((0.0, chance.random() * LATE_S)) for _ in range(dist.get_world_size())]
        begin_together(groups, store, 2 * number)
        begun, before = time.monotonic(), state.placed
        delay = moment * lasted + (rank != victim) * delays[rank]
        ending = threading.Timer(delay, groups.abort)
        ending.start()
        problem = outcome(lambda chance=chance: state.move(chance))
        assert problem in ("", "Aborted", "PeerFailure"), problem
        lasted = lasted if problem else time.monotonic() - begun
        ending.join()
        if rank == victim:  # a new worker has its place
            state.fill(junk=True)
            state.replicas.take(state.replicas.plans, state.replicas.nodes)
            state.shards.take(state.shards.assignment)
        begin_together(groups, store, 2 * number + 1)
        state.settle(trained=rank != victim)
        told["cut_off"] += bool(problem)
        told["landed"] += bool(problem) and before != state.placed
        told["wrong"] += state.wrong() if rank != victim else 0
        state.shards.begin(state.replicas.nodes[0])
        state.fill()
    groups.destroy()
    return told


def _built(flags: dict, groups, store) -> WorkerParts:
    (config, program), job = program_of(flags), Job()
    begin_together(groups, store, 0)
    elastic.build_groups(config, job, dict(get_embedding_ranks=None, get_position_embedding_ranks=None))
    world = initialize.world_of(job)
    initialize.seed_streams(config.rng.seed, 0, world)
    return program.build(config, world, StopRequests(config), Phases())
