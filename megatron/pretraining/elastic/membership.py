"""Handles membership changes: finds the surviving state, and moves it to the plans of the new members.

Survivors keep their state. It becomes a plan of the new members, in which new workers have no expert. From there,
experts move to the target plan, layer by layer, as in a rebalancing (:mod:`megatron.pretraining.elastic.replicas`).
After another loss, each layer has its old or its new placement, and the remaining members restart the move from there.

Joining nodes are admitted between two iterations: all workers leave the generation after the same iteration, so that no
iteration is discarded.

Departing nodes leave between two iterations, too. Before, their state moves to the plans of the other nodes, as in a
rebalancing after which they hold nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.pretraining.config import Config
from megatron.pretraining.elastic.groups import exchange_group
from megatron.pretraining.elastic.placement import (
    Nodes,
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
from megatron.pretraining.elastic.state_transfer import Shards
from megatron.pretraining.elastic.state_transfer import settle_shards as settle_shards
from megatron.pretraining.engine.megatron import MegatronEngine
from megatron.pretraining.parts import Callback, MembersChange, TrainingRun
from moc.cli_output import counted
from moc.elastic.plan import Loads, Plan
from moc.elastic.transfers import ShardAssignment, count_new_replicas, expert_operator
from moc.fault_points import reach
from moc.runtime.collectives import gather
from moc.runtime.device import synchronize_and_check
from moc.runtime.environment import min_nodes
from moc.runtime.job import World
from moc.session.engine import Listener
from moc.session.resume.point import NoRecoveryPoint
from moc.session.session import Session


class ReportedState(NamedTuple):
    """State that a worker reports when workers connect.

    Attributes:
        place: rank block of its node.
        stage: its pipeline stage.
        trained: whether it has state of the run.
        plan: digest of its stage's plan in force; None without experts.
        awaited: digest of :attr:`Replicas.awaited`.
        moves: whether experts still have to move to plans of other members.
    """

    place: int
    stage: int
    trained: bool
    plan: str | None
    awaited: str | None
    moves: bool


class Settled(NamedTuple):
    """Agreement among the connected workers.

    Attributes:
        under_way: whether some have trained, so that the plans in force belong to a started run.
        lost: state without a holder, as the subject of a sentence; empty if nothing is lost.
        experts: number of experts without a holder, if these are all that is lost; the other state stays.
        lacking: operators among them that this worker has a slot for.
    """

    under_way: bool
    lost: str = ""
    experts: int = 0
    lacking: frozenset[str] = frozenset()


def settle(
    config: Config, replicas: Replicas, shards: Shards | None, trained: bool, helpers: Sequence[int] = ()
) -> Settled:
    """Agrees on the holders of experts and blocks; a collective call of all workers.

    A layer whose move has landed on one worker lands on all. Workers that have not ``trained`` take over the plans of
    the others, not the state. If the members have changed, :attr:`Replicas.wanted` are the plans to move to, and
    :attr:`Shards.wanted` is the assignment. If only experts are lost, they have slots in the plans in force. Otherwise
    the wanted plans are in force immediately, and all workers must load their state.

    Args:
        config: the flags.
        replicas: replicas of experts.
        shards: shards of the dense optimizer state; None if it is not sharded.
        trained: whether this worker has trained.
        helpers: by partial-model node (the last nodes), its part of the model.

    Raises:
        NoRecoveryPoint: no worker has trained, and this worker was built with other experts than it is assigned.
    """
    stage, awaited = parallel_state.get_pipeline_model_parallel_rank(), replicas.awaited
    plan = replicas.plans.get(stage)  # None if layers are dense
    moves = replicas.wanted is not None
    mine = ReportedState(place(), stage, trained, plan and plan.digest, awaited and awaited.digest, moves)
    told = [ReportedState(*one) for one in gather(tuple(mine))]
    nodes = nodes_there(config, [(one.place, one.stage) for one in told], helpers)
    if not any(one.trained for one in told):
        _begin(config, replicas, shards, nodes)
        return Settled(under_way=False)
    known, loads = _shared(told, [one for one in (plan, awaited) if one is not None], replicas.loads)
    trained_stages = {one.stage for one in told if one.trained}
    empty = [] if min_nodes() is None else sorted({one.stage for one in told} - trained_stages)
    changed = bool(empty) or any(one.moves for one in told) or any(_members_differ(known, one, nodes) for one in told)
    plans = {}
    for number, own in replicas.plans.items():
        if number in empty:
            continue  # new workers have their own plan, and others an old one
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
    lost = f"pipeline stage {empty[0] + 1}" if empty else ""
    if shards is not None and not settle_shards(shards, nodes[stage], trained):
        lost = lost or "a shard of the optimizer's state"
    if not lost:
        return _settle_experts(replicas, plans, wanted, nodes)
    replicas.take(wanted or plans, nodes)
    replicas.wanted = None
    if shards is not None:
        shards.begin(nodes[stage])
    return Settled(True, lost)


def _settle_experts(replicas: Replicas, plans: Plans, wanted: Plans | None, nodes: NodesOfStages) -> Settled:
    """Puts the plans of the survivors in force, with slots for experts that none of them holds."""
    lost = {stage: plan.lost_experts(plan.members) for stage, plan in plans.items()} if wanted else {}
    whole = {stage: plan.with_lost_experts(wanted[stage]) if wanted else plan for stage, plan in plans.items()}
    replicas.take(whole, nodes)
    replicas.wanted = wanted
    if not any(lost.values()):
        return Settled(True)
    stage, rank = parallel_state.get_pipeline_model_parallel_rank(), dist.get_rank(exchange_group())
    lacking = (one for one in lost.get(stage, ()) if one[1] in whole[stage].experts_of(one[0], rank))
    names = frozenset(expert_operator(*one) for one in lacking)
    return Settled(True, _subject([one for of in lost.values() for one in of]), sum(map(len, lost.values())), names)


def _members_differ(known: Mapping[str, Plan], one: ReportedState, nodes: NodesOfStages) -> bool:
    """Returns whether the plan in force on a worker has other members than the connected nodes."""
    return bool(one.trained and one.plan) and known[one.plan or ""].members != nodes[one.stage].members


def _subject(lost: Sequence[tuple[int, int]]) -> str:
    """Returns the experts without a holder, as the subject of a sentence; empty if there are none."""
    others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return f"expert {lost[0][1]} of layer {lost[0][0] + 1}{others}" if lost else ""


def decided(in_force: Sequence[Plan], awaited: Sequence[Plan], own: Plan) -> Plan:
    """Returns the plan that all workers of a stage have after a loss; pure.

    A loss may interrupt the move of a layer. Some workers then know that all parts arrived, and have the new plan in
    force. Others still have the old plan, and await the new one. In this case, the new plan is returned.

    Args:
        in_force: plans of workers that have trained.
        awaited: plans of workers that received their part of a move, and may not know whether all did.
        own: the plan of this worker, used if no worker of the stage has trained.

    Raises:
        PlansDiffer: workers that have trained hold experts by different plans.
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
    """Returns whether all state is where the current members need it."""
    return replicas.wanted is None and (shards is None or shards.wanted is None)


class HandOver(NamedTuple):
    """State of departing nodes, and its targets.

    Attributes:
        plans: plans of the other nodes, for the ranks of all nodes.
        shards: assignment of the other nodes, for the ranks of all nodes; None if the dense state is not sharded.
        nodes: number of the other nodes.
    """

    plans: Plans
    shards: ShardAssignment | None
    nodes: int


def hand_over_of(config: Config, replicas: Replicas, shards: Shards | None, departing: Collection[int]) -> HandOver:
    """Plans the move of all state from departing nodes to the others; pure, so all workers agree.

    Args:
        config: the flags.
        replicas: replicas of experts.
        shards: shards of the dense optimizer state; None if it is not sharded.
        departing: numbers of the nodes, as in :attr:`Plan.members`; each stage has others.
    """
    nodes = {
        stage: Nodes(tuple(member for member in of.members if member not in departing), of.ranks)
        for stage, of in replicas.nodes.items()
    }
    plans = plans_for(config, nodes, replicas.loads or no_loads(config), replicas.plans)
    now = replicas.nodes[parallel_state.get_pipeline_model_parallel_rank()]
    cut = None
    if shards is not None:
        left, (members, ranks) = nodes[parallel_state.get_pipeline_model_parallel_rank()], shards.spread(now)
        cut = shards.cut_of(left).restricted_to(members, [True] * len(members) * ranks)
    return HandOver(
        {
            stage: plan.restricted_to(of.members, [True] * len(of.members) * of.ranks)
            for stage, plan in plans.items()
            for of in [replicas.nodes[stage]]
        },
        cut,
        len({member for of in nodes.values() for member in of.members}),
    )


def hand_over(
    config: Config,
    replicas: Replicas,
    shards: Shards | None,
    engine: MegatronEngine,
    session: Session,
    log: Listener,
    departing: Collection[int],
) -> None:
    """Moves all state from departing nodes to the others, between two iterations; a collective call.

    Arguments as in :func:`hand_over_of` and :func:`migrate`.
    """
    target = hand_over_of(config, replicas, shards, departing)
    replicas.wanted = target.plans
    if shards is not None:
        shards.wanted = target.shards
    migrate(replicas, shards, engine, session, log, target.nodes)


def migrate(
    replicas: Replicas,
    shards: Shards | None,
    engine: MegatronEngine,
    session: Session,
    log: Listener,
    nodes: int | None = None,
) -> None:
    """Moves state to the wanted plans and assignment, between two iterations; a collective call.

    Args:
        replicas: replicas of experts.
        shards: shards of the dense optimizer state; None if it is not sharded.
        engine: the engine.
        session: the session.
        log: receives a message and an event.
        nodes: number of nodes that continue; by default, all current ones.
    """
    before, begun, taken = dict(replicas.plans), time.perf_counter(), 0
    wanted = before if replicas.wanted is None else replicas.wanted
    with session.moving():
        if shards is not None and shards.wanted is not None:
            taken += shards.move_to(shards.wanted)
        if replicas.wanted is not None:
            taken += replicas.move_to(wanted)
        engine.state.describe()
    copied = sum(count_new_replicas(before[stage], plan) for stage, plan in wanted.items())
    count = nodes or len({member for of_stage in replicas.nodes.values() for member in of_stage.members})
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


@dataclass(frozen=True)
class ReplicaCounts:
    """Replicas of the experts under the plans in force.

    Attributes:
        least: replicas of the expert with the fewest.
        fewer: number of experts with fewer than ``wanted``.
        experts: number of experts, over all layers.
        wanted: f, ``--elastic-min-replicas``.
    """

    least: int
    fewer: int
    experts: int
    wanted: int

    @classmethod
    def of(cls, plans: Plans, wanted: int) -> ReplicaCounts:
        """Counts the replicas of plans."""
        counts = numpy.concatenate([plan.replica_counts().ravel() for plan in plans.values() if plan.tables] or [[0]])
        return cls(int(counts.min()), int((counts < wanted).sum()), counts.size, wanted)

    @property
    def sentence(self) -> str:
        """Sentence about the replicas of all experts, with a warning if some have fewer than f."""
        sentence = f"every expert has at least {counted(self.least, 'replica')}"
        if not self.fewer:
            return sentence
        few = f"{self.fewer} of {self.experts} have fewer than {self.wanted} (--elastic-min-replicas)"
        return (
            f"WARNING: {sentence}, and {few}: the loss of {counted(self.least, 'node')} can lose experts. "
            "Fix: raise --elastic-slots, or add nodes"
        )


def _begin(config: Config, replicas: Replicas, shards: Shards | None, nodes: NodesOfStages) -> None:
    """Takes over the numbers of the connected nodes.

    A worker has the initial weights only of the experts that it was built with. It cannot begin if it is assigned
    others, because the number of workers changed, or because it took over plans of lost workers.
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
    return lambda plan: plan.restricted_to(members, trained)


def _shared(told: Sequence[ReportedState], mine: Sequence[Plan], loads: Loads) -> tuple[dict[str, Plan], Loads]:
    """Returns all plans by digest, each from the first worker that has it, and the loads; a collective call.

    The loads are from the first worker that has trained: others may have missed a commit.
    """
    rank, trained = dist.get_rank(), next(rank for rank, one in enumerate(told) if one.trained)
    first: dict[str | None, int] = {}
    for number, one in enumerate(told):
        first.setdefault(one.plan, number)
        first.setdefault(one.awaited, number)
    plans = {plan.digest: plan.to_json() for plan in mine if first[plan.digest] == rank}
    shared = gather((plans, dict(loads) if rank == trained else {}))
    return {key: Plan.from_json(one) for part, _ in shared for key, one in part.items()}, shared[trained][1]


class Guests(Callback):
    """Agreement on the iteration after which all workers leave, for one generation.

    Args:
        world: this worker's coordinates.
        hand_over: moves all state from departing nodes, given by rank block, to the others; a collective call.
    """

    def __init__(self, world: World, hand_over: Callable[[Collection[int]], None]):
        self._world, self._hand_over, self._wait = world, hand_over, False

    def contribution(self) -> dict[str, float]:
        """Returns whether this worker was notified that nodes join or depart; others may not be yet."""
        return {"guests": float(self._world.job.has_change_notice)}

    def on_totals(self, totals: Mapping[str, float]) -> None:
        """Makes all workers leave after this iteration if any was notified."""
        self._wait = totals["guests"] > 0

    def between_iterations(self, run: TrainingRun) -> None:
        self.leave()

    def leave(self) -> None:
        """Leaves the generation between two iterations, if the commit all-reduce decided so.

        Raises:
            MembersChange: on all workers; the device has completed its enqueued work.
            Aborted: another worker was lost meanwhile.
        """
        if self._wait:
            synchronize_and_check(self._world.device)
            departing = {block for told in gather(self._world.job.departing) for block in told}
            if departing:
                self._hand_over(departing)
            reach("draining")
            raise MembersChange(place() in departing)
