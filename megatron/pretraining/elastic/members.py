"""Other members: what the workers that are left hold, and where it moves to.

Survivors keep their state.  What they hold by the old plan is a plan of the new members, in which new workers have no
expert; from there, experts move to the plan that the new members are to have, layer by layer, like in a rebalancing
(:mod:`megatron.pretraining.elastic.replicas`).  A loss meanwhile leaves each layer as it was or as it is to be, and the
move begins again from there, with the members that are left then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch.distributed as dist
from megatron.core import parallel_state

from megatron.pretraining.config import Config
from megatron.pretraining.elastic.placing import (
    NodesOfStages,
    Plans,
    PlansDiffer,
    first_plans,
    no_loads,
    nodes_there,
    place,
    plans_for,
)
from megatron.pretraining.elastic.replicas import Replicas
from megatron.pretraining.elastic.shards import Shards
from megatron.pretraining.elastic.shards import settle as settle_shards
from megatron.pretraining.engine.megatron import MegatronEngine
from moc.elastic.boxes import copies
from moc.elastic.plan import Loads, Plan
from moc.runtime.agreement import gather
from moc.runtime.environment import fewest_nodes
from moc.session.engine import Listener
from moc.session.resume.point import NoRecoveryPoint
from moc.session.session import Session


class Told(NamedTuple):
    """What a worker tells the others when they meet.

    Attributes:
        place: of its node in the job.
        stage: its pipeline stage.
        trained: it has state of the run.
        plan: digest of that of its stage, in force on it.
        awaited: digest of :attr:`Replicas.awaited`.
        moves: experts are yet to move to plans of other members.
    """

    place: int
    stage: int
    trained: bool
    plan: str | None
    awaited: str | None
    moves: bool


class Settled(NamedTuple):
    """What workers agree on when they meet.

    Attributes:
        under_way: some have trained, so that plans in force are those of a run under way.
        lost: what no worker holds any more, as the subject of a sentence; empty if nothing is lost.
    """

    under_way: bool
    lost: str = ""


def settle(
    config: Config, replicas: Replicas, shards: Shards | None, trained: bool, helpers: Sequence[int] = ()
) -> Settled:
    """Agrees on who holds what among the workers that are there; a collective call of all workers.

    A layer whose move has landed on one worker lands on all.  Workers that have not ``trained`` take over the plans of
    the others, not the state.  If the members have changed, :attr:`Replicas.wanted` are the plans to move to, and
    :attr:`Shards.wanted` is the cut.  If something is lost, these are in force at once, and all workers must load their
    state.

    Args:
        config: the flags.
        replicas: of experts.
        shards: of the dense optimizer state; None if it is whole.
        trained: whether this worker has.
        helpers: of the last nodes, which help: the part of the model that each has.

    Raises:
        NoRecoveryPoint: nobody has trained, and this worker was built with other experts than it is to have.
    """
    stage, awaited = parallel_state.get_pipeline_model_parallel_rank(), replicas.awaited
    plan = replicas.plans.get(stage)  # None where layers are dense
    moves = replicas.wanted is not None
    mine = Told(place(), stage, trained, plan and plan.digest, awaited and awaited.digest, moves)
    told = [Told(*one) for one in gather(tuple(mine))]
    nodes = nodes_there(config, [(one.place, one.stage) for one in told], helpers)
    if not any(one.trained for one in told):
        _begin(config, replicas, shards, nodes)
        return Settled(under_way=False)
    known, loads = _shared(told, [one for one in (plan, awaited) if one is not None], replicas.loads)
    empty = [] if fewest_nodes() is None else _without_state(told)
    changed = bool(empty) or any(one.moves for one in told) or any(_members_differ(known, one, nodes) for one in told)
    plans = {}
    for number, own in replicas.plans.items():
        if number in empty:
            continue  # whoever has come has a plan of its own, and others an old one
        of_stage = [one for one in told if one.stage == number]
        as_now = _among(nodes[number].members, [one.trained for one in of_stage]) if changed else _unchanged
        plans[number] = decided(
            [as_now(known[one.plan]) for one in of_stage if one.trained and one.plan],
            [as_now(known[one.awaited]) for one in of_stage if one.awaited],
            own,
        )
        if number == stage and awaited is not None and as_now(awaited) == plans[number]:
            replicas.land(plans[number])
    wanted = plans_for(config, nodes, loads or no_loads(config), plans) if changed else None
    lost = f"pipeline stage {empty[0] + 1}" if empty else _lost(plans) if changed else ""
    if shards is not None and not settle_shards(shards, nodes[stage], trained):
        lost = lost or "a shard of the optimizer's state"
    replicas.take(wanted if lost and wanted else plans, nodes)
    replicas.wanted = None if lost else wanted
    if shards is not None and lost:
        shards.begin(nodes[stage])
    return Settled(True, lost)


def _without_state(told: Sequence[Told]) -> list[int]:
    """The pipeline stages of which no worker has trained."""
    return sorted({one.stage for one in told} - {one.stage for one in told if one.trained})


def _members_differ(known: Mapping[str, Plan], one: Told, nodes: NodesOfStages) -> bool:
    """Whether the plan in force on a worker is one of other members than those that are there."""
    return bool(one.trained and one.plan) and known[one.plan or ""].members != nodes[one.stage].members


def _lost(plans: Plans) -> str:
    """Which experts no worker holds, as the subject of a sentence; empty if there are none."""
    lost = [one for plan in plans.values() for one in plan.missing(plan.members)]
    others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return f"expert {lost[0][1]} of layer {lost[0][0] + 1}{others}" if lost else ""


def decided(in_force: Sequence[Plan], awaited: Sequence[Plan], own: Plan) -> Plan:
    """The plan of a stage that all its workers are to have after a loss; pure.

    A loss may part workers while experts of one layer move: some know that all have got their parts, and have the new
    plan in force; others still have the old one, and await the new one.  Then the new one it is.

    Args:
        in_force: plans of workers that have trained.
        awaited: plans of those that have got their part of a move, and may not know that all have.
        own: the plan of this worker, if nobody of the stage has trained.

    Raises:
        PlansDiffer: workers that have trained hold experts by other plans.
    """
    found = set(in_force)
    possible = found & set(awaited) or found or {own}
    if len(possible) > 1:
        raise PlansDiffer(
            "workers that are left hold experts by different plans. Fix: restart the job from its last checkpoint, and "
            "report this as an error of the program"
        )
    return possible.pop()


def is_settled(replicas: Replicas, shards: Shards | None) -> bool:
    """Whether state is where the members are to have it."""
    return replicas.wanted is None and (shards is None or shards.wanted is None)


def migrate(replicas: Replicas, shards: Shards | None, engine: MegatronEngine, session: Session, log: Listener) -> None:
    """Moves state to where the members are to have it, between two iterations; a collective call."""
    before, begun, taken = dict(replicas.plans), time.perf_counter(), 0
    wanted = before if replicas.wanted is None else replicas.wanted
    with session.moving():
        if shards is not None and shards.wanted is not None:
            taken += shards.move_to(shards.wanted)
        if replicas.wanted is not None:
            taken += replicas.move_to(wanted)
        engine.state.describe()
    copied = sum(copies(before[stage], plan) for stage, plan in wanted.items())
    count = len({member for of_stage in replicas.nodes.values() for member in of_stage.members})
    seconds, amount, iteration = time.perf_counter() - begun, sum(gather(taken)), session.position.iteration
    log.events.write(
        "migration",
        iteration=iteration,
        nodes=count,
        experts=copied,
        bytes=amount,
        elapsed_s=round(seconds, 6),
    )
    log.message(
        f"{count} nodes continue from iteration {iteration}: {copied} copies of experts moved in {seconds:.2f} s"
    )


def _begin(config: Config, replicas: Replicas, shards: Shards | None, nodes: NodesOfStages) -> None:
    """Takes over the numbers of the nodes that are there.

    A worker has the initial weights of the experts that it was built with: it cannot begin if these are others now,
    since the number of workers has changed, or since it has taken over plans of workers that are gone.
    """
    numbered = {stage: replace(plan, members=nodes[stage].members) for stage, plan in replicas.plans.items()}
    if numbered != first_plans(config, nodes):
        raise NoRecoveryPoint
    replicas.take(numbered, nodes)
    if shards is not None:
        shards.begin(nodes[parallel_state.get_pipeline_model_parallel_rank()])


def _unchanged(plan: Plan) -> Plan:
    return plan


def _among(members: Sequence[int], trained: Sequence[bool]) -> Callable[[Plan], Plan]:
    return lambda plan: plan.among(members, trained)


def _shared(told: Sequence[Told], mine: Sequence[Plan], loads: Loads) -> tuple[dict[str, Plan], Loads]:
    """All plans by digest, each from the first worker that has it, and the load; a collective call.

    The load is what the first worker has seen that has trained: another one may have missed a vote.
    """
    rank, trained = dist.get_rank(), next(rank for rank, one in enumerate(told) if one.trained)
    first: dict[str | None, int] = {}
    for number, one in enumerate(told):
        first.setdefault(one.plan, number)
        first.setdefault(one.awaited, number)
    plans = {plan.digest: plan.to_json() for plan in mine if first[plan.digest] == rank}
    shared = gather((plans, dict(loads) if rank == trained else {}))
    return {key: Plan.from_json(one) for part, _ in shared for key, one in part.items()}, shared[trained][1]
