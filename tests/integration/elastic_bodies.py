"""What workers do in tests of elastic training."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections import Counter
from unittest import mock

import torch.distributed as dist

from megatron.pretraining import errors, loop
from megatron.pretraining.elastic import placement
from megatron.pretraining.elastic.groups import dispatch_group
from megatron.pretraining.elastic.placement import plans_to_json
from megatron.pretraining.elastic.rebalancing import Prospect, Rebalancer
from megatron.pretraining.elastic.replicas import Replicas
from megatron.pretraining.engine.state import MegatronState
from moc.elastic.placement import EMPTY
from moc.errors import codes_in
from moc.state.operators import Detail
from tests.integration import bodies


def train(flags: dict, vacant: bool = False) -> dict:
    """As ``bodies.train``; any other plan pays.  With ``vacant``, some slots are.

    Returns:
        Also ``moved``, the bytes that arrived here in each rebalancing; ``flows``, of each, the plans before and after
        it, the bytes of an expert by layer, and those that went from here to each rank; ``state``, the digest of each
        fragment of master weights, moments and compute weights; ``steps``, their updates; and ``dispatch``, the
        workers among which tokens are dispatched.
    """
    Prospect.pays = lambda self, iterations: True
    if vacant:
        placement.make_plan = with_gaps(placement.make_plan)
    more: dict = {"moved": [], "flows": [], "state": {}, "steps": {}}
    move, run_loop = Replicas.move_to, loop.train

    def watched_move(self, plans, flow=None) -> int:
        before, sent = plans_to_json(self.plans), Counter()
        with mock.patch.object(dist, "all_to_all_single", counting(sent)):
            more["moved"].append(move(self, plans, flow))
        more["flows"].append((before, plans_to_json(plans), self.sizes, dict(sent)))
        return more["moved"][-1]

    def watched_loop(run, stop):
        code = run_loop(run, stop)
        state = MegatronState(run.stepper.chunks, run.stepper.optimizer.core, run.stepper.modules)
        for detail in (Detail.FULL, Detail.COMPUTE):
            for f in state.fragments(state.operators(), detail):
                more["state"][f"{f.name} {f.slot} {f.region}"] = bodies.digest(f.view)
        more["steps"] = state.steps()
        more["dispatch"] = dist.get_world_size(dispatch_group())
        return code

    Replicas.move_to, loop.train = watched_move, watched_loop
    return bodies.train(flags) | more


def counting(sent: Counter):
    """An all-to-all that counts the bytes that go to each rank of its group."""
    exchange = dist.all_to_all_single

    def counted(output, tensor, output_sizes=None, input_sizes=None, **options):
        sent.update({rank: size * tensor.itemsize for rank, size in enumerate(input_sizes) if size})
        return exchange(output, tensor, output_sizes, input_sizes, **options)

    return counted


def with_gaps(plan):
    """A way of planning that leaves a slot of the first rank of each stage empty, at first and in every other plan."""
    made: Counter[tuple[int, ...]] = Counter()

    def planned(members, loads, settings, before):
        found = plan(members, loads, settings, before)
        made[tuple(found.tables)] += before is not None
        gaps = before is None or made[tuple(found.tables)] % 2 == 0
        for layer, table in found.tables.items() if gaps else ():
            spare = [e for e in found.experts_of(layer, 0) if len(found.holders(layer, e)) > 1]
            rows = table.copy()
            rows[0] = [*(expert for expert in table[0] if expert != spare[0]), EMPTY]
            found = dataclasses.replace(found, tables={**found.tables, layer: rows})
        return found

    return planned


def cuts_that_differ(flags: dict) -> dict:
    """Trains; from the second look on, the last worker takes the cut of its shards to be another one.

    Returns:
        ``codes`` of the errors that end training, and ``iterations`` that were completed.
    """
    told: dict = {"iterations": 0}
    on_totals = Rebalancer.on_totals

    def watched(self, totals) -> None:
        on_totals(self, totals)
        told["iterations"] += 1
        if dist.get_rank() == dist.get_world_size() - 1:
            self._shards.assignment = dataclasses.replace(
                self._shards.assignment, holders=self._shards.assignment.holders[::-1]
            )

    def end(program, sentences, code) -> None:
        told["codes"] = codes_in("\n".join(sentences))
        sys.exit(code)

    Rebalancer.on_totals, errors._end = watched, end
    with contextlib.suppress(SystemExit):
        bodies.train(flags)
    return told
