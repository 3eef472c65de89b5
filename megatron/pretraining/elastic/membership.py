"""Handles membership changes: finds the surviving state, and moves it to the plans of the new members.

Survivors keep their state. The plan in force then has the new members, and new workers hold no expert. Experts move
to the target plan layer by layer, as in a rebalancing (:mod:`megatron.pretraining.elastic.replicas`). After another
loss, each layer has its old or its new placement, and the remaining members move experts from this placement.

Joining nodes are admitted between two iterations: all workers leave the generation after the same iteration, so that no
iteration is discarded.

Departing nodes also leave between two iterations. First, a rebalancing moves all of their state to the other nodes.
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
    connected_nodes,
    first_plans,
    no_loads,
    plans_for,
    rank_block,
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
        rank_block: rank block of its node.
        stage: its pipeline stage.
        trained: whether it has state of the run.
        plan: digest of its stage's plan in force; None without experts.
        awaited: digest of :attr:`Replicas.awaited`.
        moves: whether experts still have to move to plans of other members.
    """

    rank_block: int
    stage: int
    trained: bool
    plan: str | None
    awaited: str | None
    moves: bool


class Settled(NamedTuple):
    """Agreement among the connected workers.

    Attributes:
        run_started: whether some have trained, so that the plans in force belong to a started run.
        lost: state without a holder, as the subject of a sentence; empty if nothing is lost.
        experts: number of experts without a holder, if these are all that is lost; the other state stays.
        missing_operators: operators among them that this worker has a slot for.
    """

    run_started: bool
    lost: str = ""
    experts: int = 0
    missing_operators: frozenset[str] = frozenset()


def settle(
    config: Config, replicas: Replicas, shards: Shards | None, trained: bool, partial_model_parts: Sequence[int] = ()
) -> Settled:
    """Agrees on the holders of experts and blocks; a collective call of all workers.

    A layer whose move has landed on one worker lands on all. Workers that have not ``trained`` take over the plans of
    trained workers, not the state. If the members have changed, :attr:`Replicas.target` are the plans to move to, and
    :attr:`Shards.target` is the assignment. If only experts are lost, they have slots in the plans in force. Otherwise
    the target plans are in force immediately, and all workers must load their state.

    Args:
        config: the flags.
        replicas: replicas of experts.
        shards: shards of the dense optimizer state; None if it is not sharded.
        trained: whether this worker has trained.
        partial_model_parts: by partial-model node (the last nodes), its part of the model.

    Raises:
        NoRecoveryPoint: no worker has trained, and this worker was built with other experts than it is assigned.
    """
    stage, awaited = parallel_state.get_pipeline_model_parallel_rank(), replicas.awaited
    plan = replicas.plans.get(stage)  # None if layers are dense
    moves = replicas.target is not None
    local_state = ReportedState(rank_block(), stage, trained, plan and plan.digest, awaited and awaited.digest, moves)
    states = [ReportedState(*fields) for fields in gather(tuple(local_state))]
    nodes = connected_nodes(config, [(state.rank_block, state.stage) for state in states], partial_model_parts)
    if not any(state.trained for state in states):
        _begin(config, replicas, shards, nodes)
        return Settled(run_started=False)
    local_plans = [local_plan for local_plan in (plan, awaited) if local_plan is not None]
    plan_of, loads = _shared(states, local_plans, replicas.loads)
    trained_stages = {state.stage for state in states if state.trained}
    empty = [] if min_nodes() is None else sorted({state.stage for state in states} - trained_stages)
    changed = (
        bool(empty)
        or any(state.moves for state in states)
        or any(_members_differ(plan_of, state, nodes) for state in states)
    )
    plans = {}
    for number, own_plan in replicas.plans.items():
        if number in empty:
            continue  # new workers have the initial plan, and others an old one
        stage_states = [state for state in states if state.stage == number]
        has_state = [state.trained for state in stage_states]
        restrict = _restriction_to(nodes[number].members, has_state) if changed else _unchanged
        plans[number] = decided(
            [restrict(plan_of[state.plan]) for state in stage_states if state.trained and state.plan],
            [restrict(plan_of[state.awaited]) for state in stage_states if state.awaited],
            own_plan,
        )
        if number == stage and awaited is not None and restrict(awaited) == plans[number]:
            replicas.land(plans[number])
    target = plans_for(config, nodes, loads or no_loads(config), plans) if changed else None
    lost = f"pipeline stage {empty[0] + 1}" if empty else ""
    if shards is not None and not settle_shards(shards, nodes[stage], trained):
        lost = lost or "a shard of the optimizer's state"
    if not lost:
        return _settle_experts(replicas, plans, target, nodes)
    replicas.take(target or plans, nodes)
    replicas.target = None
    if shards is not None:
        shards.begin(nodes[stage])
    return Settled(True, lost)


def _settle_experts(replicas: Replicas, plans: Plans, target: Plans | None, nodes: NodesOfStages) -> Settled:
    """Puts the plans of the survivors in force, with slots for experts that none of them holds."""
    lost = {stage: plan.lost_experts(plan.members) for stage, plan in plans.items()} if target else {}
    complete = {stage: plan.with_lost_experts(target[stage]) if target else plan for stage, plan in plans.items()}
    replicas.take(complete, nodes)
    replicas.target = target
    if not any(lost.values()):
        return Settled(True)
    stage, rank = parallel_state.get_pipeline_model_parallel_rank(), dist.get_rank(exchange_group())
    missing = frozenset(
        expert_operator(layer, expert)
        for layer, expert in lost.get(stage, ())
        if expert in complete[stage].experts_of(layer, rank)
    )
    experts = [expert for of_stage in lost.values() for expert in of_stage]
    return Settled(True, _subject(experts), len(experts), missing)


def _members_differ(plan_of: Mapping[str, Plan], state: ReportedState, nodes: NodesOfStages) -> bool:
    """Returns whether the plan in force on a worker has other members than the connected nodes."""
    return bool(state.trained and state.plan) and plan_of[state.plan or ""].members != nodes[state.stage].members


def _subject(lost: Sequence[tuple[int, int]]) -> str:
    """Returns the experts without a holder, as the subject of a sentence; empty if there are none."""
    remainder = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return f"expert {lost[0][1]} of layer {lost[0][0] + 1}{remainder}" if lost else ""


def decided(in_force: Sequence[Plan], awaited: Sequence[Plan], own_plan: Plan) -> Plan:
    """Returns the plan that all workers of a stage have after a loss; pure.

    A loss may interrupt the move of a layer. Some workers then know that all parts arrived, and have the new plan in
    force. Others still have the old plan, and await the new one. In this case, the new plan is returned.

    Args:
        in_force: plans of workers that have trained.
        awaited: plans of workers that received their part of a move, and may not know whether all did.
        own_plan: the plan of this worker, used if no worker of the stage has trained.

    Raises:
        PlansDiffer: workers that have trained hold experts by different plans.
    """
    candidates = set(in_force)
    possible = candidates & set(awaited) or candidates or {own_plan}
    if len(possible) > 1:
        raise PlansDiffer(
            "workers that are left hold experts by different plans. Fix: restart the job from its last checkpoint, and "
            "report this as an error of the program"
        )
    return possible.pop()


def is_settled(replicas: Replicas, shards: Shards | None) -> bool:
    """Returns whether all state is where the current members need it."""
    return replicas.target is None and (shards is None or shards.target is None)


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
        stage: Nodes(tuple(member for member in stage_nodes.members if member not in departing), stage_nodes.ranks)
        for stage, stage_nodes in replicas.nodes.items()
    }
    plans = plans_for(config, nodes, replicas.loads or no_loads(config), replicas.plans)
    current_nodes = replicas.nodes[parallel_state.get_pipeline_model_parallel_rank()]
    assignment = None
    if shards is not None:
        remaining, (members, ranks) = (
            nodes[parallel_state.get_pipeline_model_parallel_rank()],
            shards.spread(current_nodes),
        )
        assignment = shards.assignment_for(remaining).restricted_to(members, [True] * len(members) * ranks)
    return HandOver(
        {
            stage: plan.restricted_to(stage_nodes.members, [True] * len(stage_nodes.members) * stage_nodes.ranks)
            for stage, plan in plans.items()
            for stage_nodes in [replicas.nodes[stage]]
        },
        assignment,
        len({member for stage_nodes in nodes.values() for member in stage_nodes.members}),
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
    replicas.target = target.plans
    if shards is not None:
        shards.target = target.shards
    migrate(replicas, shards, engine, session, log, target.nodes)


def migrate(
    replicas: Replicas,
    shards: Shards | None,
    engine: MegatronEngine,
    session: Session,
    log: Listener,
    nodes: int | None = None,
) -> None:
    """Moves state to the target plans and assignment, between two iterations; a collective call.

    Args:
        replicas: replicas of experts.
        shards: shards of the dense optimizer state; None if it is not sharded.
        engine: the engine.
        session: the session.
        log: receives a message and an event.
        nodes: number of nodes that continue; by default, all current ones.
    """
    previous_plans, start, received_bytes = dict(replicas.plans), time.perf_counter(), 0
    target = previous_plans if replicas.target is None else replicas.target
    with session.moving():
        if shards is not None and shards.target is not None:
            received_bytes += shards.move_to(shards.target)
        if replicas.target is not None:
            received_bytes += replicas.move_to(target)
        engine.state.describe()
    copied = sum(count_new_replicas(previous_plans[stage], plan) for stage, plan in target.items())
    count = nodes or len({member for of_stage in replicas.nodes.values() for member in of_stage.members})
    seconds, iteration = time.perf_counter() - start, session.position.iteration
    total_bytes = sum(gather(received_bytes))
    log.events.write(
        "migration",
        iteration=iteration,
        nodes=count,
        experts=copied,
        bytes=total_bytes,
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
    def of(cls, plans: Plans, min_replicas: int) -> ReplicaCounts:
        """Counts the replicas of plans."""
        replicas = numpy.concatenate([plan.replica_counts().ravel() for plan in plans.values() if plan.tables] or [[0]])
        return cls(int(replicas.min()), int((replicas < min_replicas).sum()), replicas.size, min_replicas)

    @property
    def sentence(self) -> str:
        """Sentence about the replicas of all experts, with a warning if some have fewer than f."""
        sentence = f"every expert has at least {counted(self.least, 'replica')}"
        if not self.fewer:
            return sentence
        warning = f"{self.fewer} of {self.experts} have fewer than {self.wanted} (--elastic-min-replicas)"
        return (
            f"WARNING: {sentence}, and {warning}: the loss of {counted(self.least, 'node')} can lose experts. "
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


def _restriction_to(members: Sequence[int], trained: Sequence[bool]) -> Callable[[Plan], Plan]:
    return lambda plan: plan.restricted_to(members, trained)


def _shared(
    states: Sequence[ReportedState], local_plans: Sequence[Plan], loads: Loads
) -> tuple[dict[str, Plan], Loads]:
    """Returns all plans by digest, each from the first worker that has it, and the loads; a collective call.

    The loads are from the first worker that has trained: others may have missed a commit.
    """
    rank, trained = dist.get_rank(), next(rank for rank, state in enumerate(states) if state.trained)
    first: dict[str | None, int] = {}
    for number, state in enumerate(states):
        first.setdefault(state.plan, number)
        first.setdefault(state.awaited, number)
    plans = {plan.digest: plan.to_json() for plan in local_plans if first[plan.digest] == rank}
    shared = gather((plans, dict(loads) if rank == trained else {}))
    return {key: Plan.from_json(plan) for part, _ in shared for key, plan in part.items()}, shared[trained][1]


class DrainAgreement(Callback):
    """Agreement on the iteration after which all workers leave, for one generation.

    Args:
        world: this worker's coordinates.
        hand_over: moves all state from departing nodes, given by rank block, to the others; a collective call.
    """

    def __init__(self, world: World, hand_over: Callable[[Collection[int]], None]):
        self._world, self._hand_over, self._drain_requested = world, hand_over, False

    def contribution(self) -> dict[str, float]:
        """Returns whether this worker was notified that nodes join or depart; others may not be yet."""
        return {"guests": float(self._world.job.has_change_notice)}

    def on_totals(self, totals: Mapping[str, float]) -> None:
        """Makes all workers leave after this iteration if any was notified."""
        self._drain_requested = totals["guests"] > 0

    def between_iterations(self, run: TrainingRun) -> None:
        self.leave()

    def leave(self) -> None:
        """Leaves the generation between two iterations, if the commit all-reduce decided so.

        Raises:
            MembersChange: on all workers; the device has completed its enqueued work.
            Aborted: another worker was lost meanwhile.
        """
        if self._drain_requested:
            synchronize_and_check(self._world.device)
            departing = {block for blocks in gather(self._world.job.departing) for block in blocks}
            if departing:
                self._hand_over(departing)
            reach("draining")
            raise MembersChange(rank_block() in departing)
