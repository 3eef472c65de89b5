"""How a job goes on, whatever is left: exact, or a reason why not."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from moc.recovery.plan import JobInventory, RankCopy, explain_no_plan, plans
from moc.recovery.sources import LIVE, MEMORY, STORAGE, AvailableCheckpoint
from moc.state.operators import Operator
from tests.cases import each_row

OPERATORS = [Operator("embedding", "embedding", 0, None, 10), Operator("layers.0.expert.0", "expert", 0, 0, 10)]
NAMES = tuple(operator.name for operator in OPERATORS)
ALIKE = dict.fromkeys(NAMES, "same")
"""What two data-parallel ranks hold."""


def holds(iteration: int, tier: str = MEMORY, names=NAMES) -> AvailableCheckpoint:
    return AvailableCheckpoint(iteration, tier, dict.fromkeys(names, "full"))


def sharded(size: int) -> dict:
    """What ranks hold with ZeRO: each something of its own."""
    return {rank: dict.fromkeys(NAMES, str(rank)) for rank in range(size)}


def first(inventory: JobInventory, exact: bool = True, only=None):
    return next(plans(inventory, OPERATORS, exact, only), None)


def test_survivors_keep_state_and_new_worker_loads_snapshot():
    plan = first(JobInventory([holds(4), holds(5)], {0: 5, 2: 5}, sharded(3)))
    assert plan.iteration == 5 and plan.keep == {0, 2} and plan.path.base.iteration == 5


def test_all_return_without_snapshot_of_their_iteration():
    plan = first(JobInventory([holds(4)], {0: 5, 2: 5}, sharded(3)))
    assert plan.iteration == 4 and not plan.keep and plan.path is not None


def test_replicas_provide_state_of_lost_worker():
    plan = first(JobInventory([holds(4)], {0: 7, 1: 7}, dict.fromkeys(range(3), ALIKE)))
    assert plan.iteration == 7 and plan.path is None
    assert plan.copies == (RankCopy(NAMES[0], 0, 2), RankCopy(NAMES[1], 1, 2))  # each of them gives a part


def test_replica_of_half_of_state_is_not_enough():
    pieces = {0: ALIKE, 1: ALIKE | {NAMES[1]: "another"}}
    assert first(JobInventory([], {0: 7}, pieces)) is None
    assert first(JobInventory([holds(7, STORAGE)], {0: 7}, pieces)).path is not None


def test_memory_precedes_replicas_and_replicas_precede_storage():
    live, pieces = {0: 7}, dict.fromkeys(range(2), ALIKE)
    assert first(JobInventory([holds(7, MEMORY)], live, pieces)).path is not None
    assert first(JobInventory([holds(7, STORAGE)], live, pieces)).path is None


def test_replicas_precede_updates_by_saved_gradients():
    gradients = AvailableCheckpoint(7, MEMORY, {NAMES[0]: "full", NAMES[1]: "grad"})
    held = [holds(6), gradients]
    plan = first(JobInventory(held, {0: 7}, dict.fromkeys(range(2), ALIKE)))
    assert plan.iteration == 7 and plan.path is None and {copy.target for copy in plan.copies} == {1}
    plan = first(JobInventory(held, {0: 7}, sharded(2)))
    assert plan.iteration == 7 and plan.keep == {0} and plan.path.gradients == {NAMES[1]: [gradients]}


def test_worker_without_commit_rolls_forward_to_replica():
    plan = first(JobInventory([holds(6)], {0: 7, 1: 6}, dict.fromkeys(range(3), ALIKE)))
    assert plan.iteration == 7 and plan.keep == {0} and {copy.target for copy in plan.copies} == {1, 2}


def test_worker_ahead_returns_if_no_snapshot_of_its_iteration():
    plan = first(JobInventory([holds(6)], {0: 7, 1: 6}, sharded(3)))
    assert plan.iteration == 6 and plan.keep == {1} and plan.path is not None


def test_sole_holder_completes_committed_iteration():
    """Its reduced gradients are those of the iteration: all had theirs, or nobody would have seen the vote."""
    pieces = {0: {NAMES[0]: "same"}, 1: ALIKE, 2: ALIKE}
    plan = first(JobInventory([holds(6, STORAGE)], {0: 7, 1: 6}, pieces, reduced={0: 7, 1: 7}))
    assert (plan.iteration, plan.keep, plan.complete, plan.path) == (7, {0}, {1}, None)
    assert plan.copies == (RankCopy(NAMES[0], 0, 2), RankCopy(NAMES[1], 1, 2))
    plan = first(JobInventory([holds(6, STORAGE)], {0: 7, 1: 6}, pieces, reduced={0: 7, 1: 6}))
    assert plan.iteration == 6 and not plan.complete


def test_all_workers_keep_state_if_none_is_lost():
    plan = first(JobInventory([], {0: 7, 1: 7}, sharded(2)))
    assert (plan.iteration, plan.keep, plan.copies, plan.path) == (7, {0, 1}, (), None)


@each_row("exact", [True, False])
def test_named_iteration_ignores_survivor_state(exact):
    plan = first(JobInventory([holds(4)], {0: 5, 1: 5}, sharded(2)), exact, only=4)
    assert plan.iteration == 4 and not plan.keep


def test_inexact_policy_keeps_complete_survivor_state():
    """In memory, a snapshot of the same iteration may have older experts."""
    plan = first(JobInventory([holds(5, STORAGE), holds(7)], {0: 7, 1: 6}, dict.fromkeys(range(3), ALIKE)), exact=False)
    assert (plan.iteration, plan.keep, plan.complete) == (7, {0}, frozenset()) and not plan.path.stale
    assert {copy.target for copy in plan.copies} == {1, 2} and plan.path.base.tier == LIVE
    pieces = {0: {NAMES[0]: "same"}, 1: ALIKE, 2: ALIKE}
    plan = first(JobInventory([holds(6, STORAGE)], {0: 7, 1: 6}, pieces, reduced={0: 7, 1: 7}), exact=False)
    assert (plan.iteration, plan.keep, plan.complete) == (7, {0}, {1}) and len(plan.copies) == 2


def test_inexact_policy_rolls_back_for_lost_operator():
    plan = first(JobInventory([holds(5), holds(7, names=NAMES[:1])], {0: 7}, sharded(2)), exact=False)
    assert plan.path.base.tier == MEMORY and not plan.keep and not plan.copies


def test_missing_state_is_named():
    assert "none" in explain_no_plan(JobInventory([]), OPERATORS)
    assert re.search(
        rf"\b5\b.*{NAMES[1]}", explain_no_plan(JobInventory([holds(4), holds(5, names=NAMES[:1])]), OPERATORS)
    )
    assert "moments" in explain_no_plan(
        JobInventory([AvailableCheckpoint(5, STORAGE, dict.fromkeys(NAMES, "compute"))]), OPERATORS
    )


@st.composite
def inventories(draw):
    size = draw(st.integers(1, 6))
    tiers = st.sampled_from([MEMORY, STORAGE])
    held = draw(
        st.lists(st.builds(holds, st.integers(1, 4), tiers, st.sets(st.sampled_from(NAMES)).map(tuple)), max_size=5)
    )
    live = draw(st.dictionaries(st.integers(0, size - 1), st.integers(1, 4), max_size=size))
    named = st.fixed_dictionaries({name: st.sampled_from("ab") for name in NAMES})
    return JobInventory(held, live, {rank: draw(named) for rank in range(size)})


@settings(deadline=None, max_examples=300)
@given(inventories())
def test_every_rank_gets_complete_state_of_one_iteration(inventory):
    for plan in plans(inventory, OPERATORS, exact=True):
        assert all(inventory.live[rank] == plan.iteration for rank in plan.keep)
        assert plan.path is None or {source.iteration for source in plan.path.sources.values()} == {plan.iteration}
        for copy in plan.copies:
            assert copy.source in plan.keep and copy.target not in plan.keep
            assert inventory.chunk_ids[copy.source][copy.operator] == inventory.chunk_ids[copy.target][copy.operator]
        if plan.path is None:
            given = {(copy.target, copy.operator) for copy in plan.copies}
            assert given == {(rank, name) for rank in set(inventory.chunk_ids) - plan.keep for name in NAMES}


@settings(deadline=None, max_examples=300)
@given(inventories())
def test_any_checkpoint_or_replica_contents_have_a_plan(inventory):
    found = [plan.iteration for plan in plans(inventory, OPERATORS, exact=True)]
    assert found == sorted(set(found), reverse=True)
    for iteration in range(1, 5):
        stored = {name for held in inventory.checkpoints if held.iteration == iteration for name in held.operators}
        alive = [rank for rank, at in inventory.live.items() if at == iteration]
        copied = alive and all(
            any(inventory.chunk_ids[rank][name] == pieces[name] for rank in alive)
            for pieces in inventory.chunk_ids.values()
            for name in NAMES
        )
        assert (iteration in found) == bool(stored == set(NAMES) or copied)
    if not found:
        assert explain_no_plan(inventory, OPERATORS)
