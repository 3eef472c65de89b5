"""What survivors keep after an inexact recovery: experts, or all of their state where nobody goes back."""

from moc.recovery.plan import JobInventory, RankCopy, live_states, plans, still_needed
from moc.recovery.sources import LIVE, MEMORY, AvailableCheckpoint
from moc.state.operators import Operator
from tests.cases import each_row

DENSE, *EXPERTS = (
    Operator("embedding", "embedding", None, None, 10),
    *(Operator(f"layers.0.expert.{number}", "expert", 0, number, 10) for number in range(3)),
)
OPERATORS = [DENSE, *EXPERTS]
NAMES = [one.name for one in EXPERTS]


def of_ranks(zero: bool) -> dict[int, dict[str, str]]:
    """Three ranks, each with an expert; dense state is replicated, or with ZeRO each has its own part."""
    return {rank: {"embedding": str(rank) if zero else "same", NAMES[rank]: "whole"} for rank in range(3)}


def saved(iteration, *experts, dense=True):
    names = [*(["embedding"] if dense else []), *(NAMES[number] for number in experts)]
    return AvailableCheckpoint(iteration, MEMORY, dict.fromkeys(names, "full"), "selective")


HELD = [saved(4, 0, 1, 2), saved(6, 0), saved(7, 1)]


def plan_of(live, pieces, keeps=True):
    held = HELD + (live_states(live, pieces, "selective") if keeps else [])
    return next(plans(JobInventory(held, live, pieces), OPERATORS, exact=False))


def sources(plan):
    return {name: held.key for (name, _), held in plan.path.sources.items()}


def test_without_zero_only_lost_expert_is_stale():
    plan = plan_of({0: 9, 1: 9}, of_ranks(zero=False))
    assert (plan.iteration, plan.keep) == (9, {0, 1}) and plan.path.base.tier == LIVE
    assert plan.copies == (RankCopy("embedding", 0, 2),)
    assert sources(plan) == dict.fromkeys(["embedding", *NAMES[:2]], (9, LIVE)) | {NAMES[2]: (4, MEMORY)}
    assert [plan.path.learned_until(name) for name in NAMES] == [9, 9, 4]


def test_zero_returns_dense_state_and_keeps_newer_experts():
    plan = plan_of({0: 9, 1: 9}, of_ranks(zero=True))
    assert (plan.iteration, plan.keep, plan.copies) == (7, frozenset(), ()) and plan.path.base.key == (7, MEMORY)
    assert sources(plan) == {"embedding": (7, MEMORY)} | dict.fromkeys(NAMES[:2], (9, LIVE)) | {NAMES[2]: (4, MEMORY)}
    assert [plan.path.learned_until(name) for name in NAMES] == [7, 7, 4]  # what is newer does not count


def test_snapshots_of_survivor_state_stay_for_next_loss():
    for zero in (True, False):
        plan = plan_of({0: 9, 1: 9}, of_ranks(zero))
        assert {one.key for one in still_needed(plan.path, HELD, OPERATORS)} == {(4, MEMORY), (6, MEMORY), (7, MEMORY)}
    plan = plan_of({}, of_ranks(True))
    assert {one.key for one in still_needed(plan.path, HELD, OPERATORS)} == {one.key for one in plan.path.checkpoints()}


def test_experts_are_reloaded_unless_policy_keeps_them():
    for zero in (True, False):
        plan = plan_of({0: 9, 1: 9}, of_ranks(zero), keeps=False)
        assert (plan.iteration, plan.keep, plan.copies) == (7, frozenset(), ())
        assert {tier for _, tier in sources(plan).values()} == {MEMORY}


def test_worker_without_commit_receives_newer_dense_state():
    plan = plan_of({0: 9, 1: 8}, of_ranks(zero=False))
    assert (plan.iteration, plan.keep) == (9, {0})
    assert plan.copies == (RankCopy("embedding", 0, 1), RankCopy("embedding", 0, 2))
    assert sources(plan)[NAMES[1]] == (8, LIVE) and plan.path.learned_until(NAMES[1]) == 8


def test_expert_with_replicas_comes_from_one_of_them():
    pieces = of_ranks(zero=False) | {3: {"embedding": "same", NAMES[2]: "whole"}}
    plan = plan_of({0: 9, 1: 9, 3: 9}, pieces)
    assert plan.keep == {0, 1, 3} and RankCopy(NAMES[2], 3, 2) in plan.copies
    assert sources(plan) == dict.fromkeys(["embedding", *NAMES], (9, LIVE))


def test_replica_one_iteration_behind_is_replaced():
    pieces = {rank: {"embedding": "same"} | dict.fromkeys(NAMES, "whole") for rank in range(3)}
    plan = plan_of({0: 9, 1: 8}, pieces)
    assert (plan.iteration, plan.keep) == (9, {0}) and {copy.target for copy in plan.copies} == {1, 2}


def test_expert_parts_come_from_one_iteration():
    pieces = {0: {"embedding": "same", NAMES[0]: "left"}, 1: {"embedding": "same", NAMES[0]: "right"}}
    (found,) = live_states({0: 9}, pieces, "selective")
    assert found.operators == {"embedding": "full"}
    assert [one.iteration for one in live_states({0: 9, 1: 8}, pieces, "selective")] == [8, 9]
    assert all(NAMES[0] not in one.operators for one in live_states({0: 9, 1: 8}, pieces, "selective"))


@each_row("zero", [True, False])
def test_no_state_is_live_without_survivors(zero):
    assert live_states({}, of_ranks(zero), "selective") == []


def test_only_lost_experts_are_updated_from_gradients():
    details = {"embedding": "full"} | dict.fromkeys(NAMES, "grad")
    later = [AvailableCheckpoint(iteration, MEMORY, details, "selective") for iteration in (5, 6)]
    chains = [saved(4, 0, 1, 2), *later]
    for live, reached in (({0: 6, 1: 6}, 6), ({0: 7, 1: 7}, 7)):
        held = chains + live_states(live, of_ranks(zero=False), "selective")
        plan = next(plans(JobInventory(held, live, of_ranks(zero=False)), OPERATORS, exact=False))
        assert plan.iteration == reached and sources(plan)[NAMES[0]] == (reached, LIVE)
        assert {name: [one.key for one in its] for name, its in plan.path.gradients.items()} == {
            NAMES[2]: [(5, MEMORY), (6, MEMORY)]
        }


def test_only_lost_expert_is_loaded():
    pieces = {rank: {"embedding": "same"} | dict.fromkeys(NAMES, "whole") for rank in range(2)}
    live, lacking = {0: 9, 1: 9}, {0: {NAMES[0]}, 1: {NAMES[0]}}
    for lacks, source, copies in (
        (lacking, (7, MEMORY), ()),
        ({0: {NAMES[0]}}, (9, LIVE), (RankCopy(NAMES[0], 1, 0),)),
    ):
        held = [saved(7, 0, 1, 2), *live_states(live, pieces, "selective", lacks)]
        plan = next(plans(JobInventory(held, live, pieces, lacking=lacks), OPERATORS, exact=False))
        assert plan.iteration == 9 and set(copies) <= set(plan.copies)
        assert sources(plan) == dict.fromkeys(["embedding", *NAMES], (9, LIVE)) | {NAMES[0]: source}
    exact = next(plans(JobInventory([saved(7, 0, 1, 2)], live, pieces, lacking=lacking), OPERATORS, exact=True))
    assert exact.iteration == 7 and not exact.keep and not exact.copies  # all go back
