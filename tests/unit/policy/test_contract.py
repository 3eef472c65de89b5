"""What every policy promises, tried with every one that is found."""

import copy

from hypothesis import given, reject
from hypothesis import strategies as st

from moc.policy import POLICIES, Every, full_plan, policy_named
from moc.state.operators import Detail
from tests.model_shape import ModelShape, model_operators


@st.composite
def questions(draw):
    """(operators, interval, iteration, load or None)."""
    expert_layers = tuple(draw(st.lists(st.integers(0, 1), min_size=1, max_size=4)))
    experts = draw(st.integers(1, 6))
    shape = ModelShape(expert_layers, 8, 16, 8, 8, 4, 100, num_experts=experts, expert_ffn_hidden_size=16)
    tokens = st.lists(st.integers(0, 1000), min_size=experts, max_size=experts)
    counted = {layer: draw(tokens) for layer, has_experts in enumerate(expert_layers) if has_experts}
    load = draw(st.sampled_from([None, counted]))
    return model_operators(shape), draw(st.integers(1, 10)), draw(st.integers(0, 100)), load


def made(name, operators, interval):
    """The policy, if it takes such a model; one that selects experts takes none without."""
    try:
        return policy_named(name)(copy.deepcopy(operators), Every(interval))
    except ValueError as refused:
        assert "has no experts" in str(refused) and all(one.expert is None for one in operators)
        reject()


@given(st.sampled_from(sorted(POLICIES)), questions())
def test_plan_depends_only_on_its_arguments(name, question):
    operators, interval, iteration, load = question
    asked = copy.deepcopy(load)
    one, other = (made(name, operators, interval) for _ in range(2))
    # The other one has been asked before, and for something else.
    other.plan(iteration + 1, None), other.plan(iteration, load)
    assert one.plan(iteration, load) == other.plan(iteration, load)
    assert load == asked


@given(st.sampled_from(sorted(POLICIES)), questions())
def test_plan_contains_operators_in_model_order(name, question):
    operators, interval, iteration, load = question
    policy = made(name, operators, interval)
    for plan in filter(None, (policy.plan(iteration, load), full_plan(policy, iteration))):
        assert (plan.iteration, plan.policy) == (iteration, name)
        assert list(plan.operators) == [operator.name for operator in operators if operator.name in plan.operators]
        in_full = set(plan.operators_at(Detail.FULL)) == {operator.name for operator in operators}
        # Where something is missing, or is there without its optimizer state, earlier snapshots are needed.
        assert not plan.complete or in_full
