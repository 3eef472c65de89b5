"""Exceptions of an installed policy are named with policy, method and line; the errors that recovery needs pass."""

import dataclasses

import pytest

from moc.policy import POLICIES, Every, Policy, SnapshotPlan, SnapshotSchedule, check_plan, policy
from moc.policy.flags import FlagConflict, PolicyFlag, PolicyFlags
from moc.policy.registry import guard_methods
from moc.state.operators import Detail
from tests.errors import raises
from tests.model_shape import ModelShape, model_operators

OPERATORS = model_operators(ModelShape((1,), 64, 256, 64, 64, 16, 1000, num_experts=4, expert_ffn_hidden_size=256))


@pytest.fixture
def failing():
    """A policy whose methods fail as its field defines."""

    class FailingFlags(PolicyFlags):
        conflicts = (FlagConflict(lambda flags: flags.nothing, "this conflicts. Fix: change it"),)

        def max_lost_tokens(self, flags):
            return flags.nothing

    @policy("failing", flags=FailingFlags())
    @dataclasses.dataclass(frozen=True)
    class Failing(Policy):
        error: Exception | None = None
        result: object = None

        @property
        def schedule(self):
            return FailingSchedule(self)

        @property
        def storage(self):
            return self.result

        def plan(self, iteration, load=None):
            return self._answer()

        def on_sizes(self, busiest):
            self._answer()

        def state_dict(self):
            return self._answer()

        def _answer(self):
            if self.error is not None:
                raise self.error
            return self.result

    class FailingSchedule(SnapshotSchedule):
        policy: Failing

        @property
        def window_length(self):
            return self.nothing

        def plan_as_due(self, iteration, load=None):
            return self.policy.result

    guard_methods(POLICIES["failing"])
    yield lambda **fields: Failing(OPERATORS, Every(1), **fields)
    del POLICIES["failing"]


def test_failing_policy_method_is_named_with_line(failing):
    with raises("policy-failed", "failing", "plan()", "ZeroDivisionError", "test_registry.py:"):
        failing(error=ZeroDivisionError("by zero")).plan(1)
    with raises("policy-failed", "schedule.window_length()", "test_registry.py:"):
        _ = failing().schedule.window_length
    flags = POLICIES["failing"].flags
    with raises("policy-failed", "max_lost_tokens()", "AttributeError"):
        flags.max_lost_tokens(object())
    with raises("policy-failed", "conflicts_in()", "AttributeError"):
        list(flags.conflicts_in(object()))


def test_contract_errors_are_passed_on(failing):
    for error in (RuntimeError("a peer is gone"), ValueError("too small")):
        with pytest.raises(type(error)) as found:
            failing(error=error).on_sizes(None)
        assert found.value is error
    with raises("policy-failed", "on_sizes()"):
        failing(error=TypeError("x")).on_sizes(None)


def test_results_of_other_types_are_refused(failing):
    assert failing().plan(1) is None
    with raises("policy-failed", "plan()", "list"):
        failing(result=[1]).plan(1)
    with raises("policy-failed", "state_dict()", "set"):
        failing(result={"saved": {1}}).state_dict()
    with raises("policy-failed", "schedule.plan_as_due()", "NoneType", "SnapshotPlan"):
        failing().schedule.plan_as_due(1)
    with raises("policy-failed", "storage()", "NoneType", "StorageSchedule"):
        _ = failing().storage


@pytest.mark.parametrize(
    "operators", [{"strange": Detail.FULL}, {OPERATORS[0].name: "full"}], ids=["operator", "detail"]
)
def test_plan_of_unknown_operators_is_refused(operators, failing):
    plan = SnapshotPlan(1, "failing", {one.name: Detail.FULL for one in OPERATORS} | operators, True)
    with raises("policy-plan-invalid", *operators):
        check_plan(failing(), plan)


def test_requirements_must_be_given_to_decorator():
    with raises("policy-class-invalid", "odd", "requires"):

        @policy("odd")
        @dataclasses.dataclass(frozen=True)
        class Odd(Policy):
            @property
            def requires(self):
                return frozenset()

            def plan(self, iteration, load=None):
                return None


def test_moved_policy_methods_are_refused():
    with raises("policy-class-invalid", "odd", "for_storage", "storage.part_of"):

        @policy("odd")
        @dataclasses.dataclass(frozen=True)
        class Odd(Policy):
            def plan(self, iteration, load=None):
                return None

            def for_storage(self, plan):
                return plan


def test_flag_of_unsupported_type_is_refused():
    with raises("policy-class-invalid", "odd_list", "list"):

        class OddFlags(PolicyFlags):
            specs = (PolicyFlag("odd_list", list, None, "A list."),)

        @policy("odd", flags=OddFlags())
        @dataclasses.dataclass(frozen=True)
        class Odd(Policy):
            list: object = None

            def plan(self, iteration, load=None):
                return None
