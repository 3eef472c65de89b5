"""Plans, the policy ``full``, and how policies are found."""

import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moc.policy import POLICIES, Every, IntervalTuner, Policy, SnapshotPlan, full_plan, policy, policy_named
from moc.policy.interface import Full
from moc.state.operators import Detail
from tests.errors import raises
from tests.model_shape import ModelShape, model_operators
from tests.unit.policy.clock import Clock

ROOT = Path(__file__).parents[3]
OPERATORS = tuple(model_operators(ModelShape((0, 1), 8, 16, 8, 8, 4, 100, num_experts=4, expert_ffn_hidden_size=16)))
MIXED = SnapshotPlan(
    7, "sparse", {"output": Detail.COMPUTE, "embedding": Detail.FULL, "layers.0.mlp": Detail.COMPUTE}, complete=False
)


def run(code, cwd=ROOT):
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True).stdout


def test_operators_at_subset_keep_their_order():
    assert MIXED.operators_at(Detail.COMPUTE) == ("output", "layers.0.mlp")
    assert MIXED.operators_at(Detail.FULL) == ("embedding",)
    assert MIXED.operators_at(Detail.GRAD) == ()
    assert MIXED.details == (Detail.FULL, Detail.COMPUTE)
    assert not MIXED.ends_window and SnapshotPlan(7, "sparse", {"output": Detail.FULL}, complete=False).ends_window


def test_plan_is_immutable():
    wanted = {"embedding": Detail.FULL}
    plan = SnapshotPlan(7, "full", wanted, complete=True)
    wanted["output"] = Detail.FULL
    assert plan.operators_at(Detail.FULL) == ("embedding",)
    assert plan == SnapshotPlan(7, "full", {"embedding": Detail.FULL}, complete=True) and len({plan, plan}) == 1
    with pytest.raises(TypeError):
        plan.operators["output"] = Detail.FULL
    with pytest.raises(FrozenInstanceError):
        plan.iteration = 8


def test_empty_plan_is_refused():
    with raises("policy-plan-invalid", "sparse", "7"):
        SnapshotPlan(7, "sparse", {}, complete=False)


@given(st.integers(1, 20), st.integers(0, 100))
def test_full_saves_everything_at_every_nth_iteration(interval, iteration):
    plan = Full(OPERATORS, Every(interval)).plan(iteration, None)
    assert (plan is not None) == (iteration > 0 and iteration % interval == 0)
    if plan:
        assert plan.operators_at(Detail.FULL) == tuple(plan.operators) == tuple(operator.name for operator in OPERATORS)
        assert (plan.iteration, plan.policy, plan.complete) == (iteration, "full", True)
        assert plan == Full(OPERATORS, Every(interval)).plan(iteration, {1: [5, 0, 9, 1]})


def test_full_follows_interval_tuner():
    tuner = IntervalTuner()
    clock, full = Clock(tuner, stall_s=1.0), Full(OPERATORS, tuner)
    for iteration in range(1, 200):
        clock.run(1)
        assert (full.plan(iteration) is not None) == (iteration in clock.starts)
    assert len(clock.starts) > 3


def test_full_plan_is_available_if_not_due():
    full = Full(OPERATORS, Every(10))
    assert full.plan(3) is None
    assert full_plan(full, 3).operators == full.plan(10).operators
    assert (full.schedule.window_length, full.requires) == (1, frozenset())


def test_policy_is_found_by_name():
    assert policy_named("full") is POLICIES["full"].policy_class is Full and Full.name == "full"
    with raises("value-not-a-choice", "fuller", " full,"):
        policy_named("fuller")


def test_duplicate_policy_name_is_refused():
    with raises("policy-class-invalid", "full"):
        policy("full")(Full)


def test_policy_without_plan_is_refused():
    @dataclass(frozen=True)
    class Nothing(Policy):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Nothing(OPERATORS, Every(1))


def test_policies_do_not_import_torch():
    program = "import sys, moc.policy; print('torch' in sys.modules)"
    assert run(program).split() == ["False"]
