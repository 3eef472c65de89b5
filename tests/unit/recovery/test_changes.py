"""What one policy makes of another's checkpoints, and what stays in memory when a run has come back by partial ones."""

from moc.errors import code_of
from moc.policy import Every, policy_named, recovers_exactly
from moc.recovery.inventory import RetainedExperts, is_planned_by, retained_experts, storage_suffices
from moc.recovery.plan import exact_resume_error
from moc.recovery.sources import BEFORE, MEMORY, STORAGE, AvailableCheckpoint, recovery_paths
from tests.cases import each_row
from tests.model_shape import ModelShape, model_operators

OPERATORS = model_operators(ModelShape((1,), 64, 256, 64, 64, 16, 1000, num_experts=4, expert_ffn_hidden_size=256))
POLICIES = {name: policy_named(name)(OPERATORS, Every(1)) for name in ("full", "pec")}
POLICIES["sparse"] = policy_named("sparse")(OPERATORS, Every(1), window=2)


def saved(name, tier, upto):
    """What a policy has saved by some iteration, all of it in one tier."""
    kind, settings = policy_named(name), {"sparse": dict(window=2), "pec": dict(k=1)}.get(name, {})
    policy, held = kind(OPERATORS, Every(1), **settings), []
    for iteration in range(1, upto + 1):
        plan = policy.plan(iteration)
        policy.on_snapshot(plan)
        details = {operator: detail.value for operator, detail in plan.operators.items()}
        held.append(AvailableCheckpoint(iteration, tier, details, name))
    return held


@each_row("tier", [MEMORY, STORAGE])
@each_row("new", POLICIES)
@each_row("old", POLICIES)
def test_changed_policy_resumes_or_reports_reason(old, new, tier):
    policy, held = POLICIES[new], saved(old, tier, upto=8)
    way = next(recovery_paths(held, OPERATORS, recovers_exactly(policy)))
    why = exact_resume_error(held, policy, way.iteration)
    if old == "pec" and new != "pec":
        assert code_of(why) == "policy-change-refused" and way.iteration == 1  # the first one of everything
        assert all(f"--ckpt-policy {name}" in str(why) for name in (new, "pec"))
        assert str(exact_resume_error(held, policy)) == str(why)
        return
    assert why is None and way.iteration >= 7  # the end of a window
    assert is_planned_by(policy, way) == (old == new)
    assert storage_suffices(held, policy) == (old == new and tier == STORAGE)


def test_complete_partial_snapshot_is_not_refused():
    everything = dict.fromkeys((one.name for one in OPERATORS), "full")
    held = [*saved("pec", STORAGE, 5), AvailableCheckpoint(6, STORAGE, everything, "pec")]
    assert exact_resume_error(held, POLICIES["full"], 6) is None


def test_experts_in_memory_are_kept_and_newer_ones_are_dropped():
    used = [
        AvailableCheckpoint(6, STORAGE, {}),
        AvailableCheckpoint(4, MEMORY, {}),
        AvailableCheckpoint(6, MEMORY, {}),
        AvailableCheckpoint(9, MEMORY, {}),
        AvailableCheckpoint(8, BEFORE, {}),
    ]
    assert retained_experts(used, in_memory=(), iteration=6) == RetainedExperts((4, 6), (9,), (8,))
    assert retained_experts(used, in_memory=(6,), iteration=6) == RetainedExperts((4,), (9,), (8,))


def test_damage_removes_only_damaged_operators():
    held = AvailableCheckpoint(3, MEMORY, {"a": "full", "b": "full"})
    assert held.without({"a"}) == AvailableCheckpoint(3, MEMORY, {"b": "full"})
    assert held.without(None) is held.without({"a", "b"}) is None
    assert held.without({"c"}) is None  # what nobody can name is not tried for ever
