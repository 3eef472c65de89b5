"""Windows of sparse checkpoints: MoEvement's Algorithm 1, its Figure 6, and what holds for any model."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.policy.window import (
    OperatorBytes,
    Turn,
    find_window_size,
    generate_schedule,
    largest_snapshot,
    order_operators,
    side_by_side,
)
from moc.state.operators import Operator
from moc.state.shape import ModelShape, model_operators
from tests.errors import raises

FIGURE_6 = ("E1", "E2", "E3", "E4", "NE", "G")
EQUAL = [OperatorBytes(12.0, 2.0)] * 6
TABLE_7 = [(6, 2), (12, 1), (10, 1), (5, 1), (4, 1)]  # bytes of a parameter in full and as compute weights


def test_figure_6():
    assert generate_schedule(FIGURE_6, 2) == [
        Turn(("E1", "E2"), ("E3", "E4", "NE", "G")),
        Turn(("E3", "E4"), ("NE", "G")),
        Turn(("NE", "G"), ()),
    ]
    dense, first = largest_snapshot(EQUAL, 6), largest_snapshot(EQUAL, 2)
    assert 1 - first / dense == pytest.approx(0.55, abs=0.01)  # the inset
    assert 1 - EQUAL[0].compute / EQUAL[0].full == pytest.approx(0.83, abs=0.01)  # section 3.2


def algorithm_1(total: int, full: float, compute: float, iteration_s: float, bandwidth: float) -> tuple[int, int]:
    """Lines 7 to 18, as they are printed."""
    active = total
    while active > 2:
        if (full * active + compute * (total - active)) / bandwidth <= iteration_s:
            break
        active -= 1
    return math.ceil(total / active), active


@settings(deadline=None)
@given(st.integers(1, 60), st.floats(2, 16), st.floats(0, 2), st.floats(0.1, 1000))
def test_algorithm_1_where_all_operators_are_equal(total, full, compute, iteration_s):
    window = find_window_size([OperatorBytes(full, compute)] * total, iteration_s, bandwidth=1.0)
    expected = algorithm_1(total, full, compute, iteration_s, 1.0)
    assert (window.length, window.active) == expected or largest_snapshot(
        [OperatorBytes(full, compute)] * total, expected[1]
    ) == pytest.approx(iteration_s)  # sums in another order


operator_sizes = st.builds(lambda c, more: OperatorBytes(c + more, c), st.integers(0, 100), st.integers(0, 100))


@settings(deadline=None)
@given(st.lists(operator_sizes, min_size=1, max_size=30), st.floats(1, 2000))
def test_the_shortest_window_that_fits(sizes, affordable):
    window = find_window_size(sizes, affordable, bandwidth=1.0)
    assert window.length == math.ceil(len(sizes) / window.active)
    assert largest_snapshot(sizes, window.active) <= affordable or window.active <= 2
    for more in range(window.active + 1, len(sizes) + 1):
        assert largest_snapshot(sizes, more) > affordable


@settings(deadline=None)
@given(st.lists(operator_sizes, min_size=1, max_size=12), st.integers(1, 12))
def test_the_largest_snapshot_is_one_of_the_schedule(sizes, active):
    schedule = generate_schedule([str(number) for number in range(len(sizes))], active)
    told = [sum(sizes[int(n)].full for n in t.full) + sum(sizes[int(n)].compute for n in t.compute) for t in schedule]
    assert largest_snapshot(sizes, active) == max(told)


@pytest.mark.parametrize("bad", [([], 1.0, 1.0), (EQUAL, 0.0, 1.0), (EQUAL, 1.0, 0.0)])
def test_nothing_to_find_a_window_by(bad):
    with raises("value-out-of-range"):
        find_window_size(*bad)


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(1, 25))
def test_each_operator_in_full_once_and_as_compute_weights_before(stages, length):
    names = [[f"{stage}.{number}" for number in range(count)] for stage, count in enumerate(stages)]
    turns = side_by_side([generate_schedule(queue, math.ceil(len(queue) / length)) for queue in names])
    assert len(turns) <= length
    for name in (name for queue in names for name in queue):
        (place,) = (i for i, turn in enumerate(turns) if name in turn.full)
        assert [name in turn.compute for turn in turns] == [i < place for i in range(len(turns))]
    assert all(turn.full for turn in turns)


def test_windows_of_table_7():
    """One machine and model explain four of the table's windows; for the third configuration the paper has 4."""
    iterations_s = [
        1.16 / 0.39,
        3.53 / 1.54,
        2.88 / 1.37,
        1.16 / 0.61,
        0.87 / 0.51,
    ]  # MoC's overhead, seconds and share
    lengths = [
        find_window_size([OperatorBytes(*sizes)] * 600, seconds, bandwidth=1.28 * 600).length
        for sizes, seconds in zip(TABLE_7, iterations_s, strict=True)
    ]
    assert lengths == [3, 6, 6, 3, 3]


def model(experts: int, layers=(1, 1)) -> list[Operator]:
    return model_operators(ModelShape(layers, 8, 16, 8, 8, 4, 100, num_experts=experts, expert_ffn_hidden_size=16))


def experts_of(ordered) -> list[tuple[int, int]]:
    return [(one.layer, one.expert) for one in ordered if one.expert is not None]


def test_unpopular_experts_first_and_what_every_token_passes_last():
    operators = model(3)
    ordered = order_operators(operators, {0: [5, 1, 4], 1: [0, 9, 4]})
    assert experts_of(ordered) == [(1, 0), (0, 1), (0, 2), (1, 2), (0, 0), (1, 1)]
    assert ordered[6:] == [one for one in operators if one.expert is None]


def test_without_scores_experts_come_by_number():
    assert experts_of(order_operators(model(2), None)) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_expert_parallel_ranks_take_turns():
    ordered = order_operators(model(4, (1,)), {0: [1, 2, 3, 4]}, ep=2)
    assert [expert for _, expert in experts_of(ordered)] == [0, 2, 1, 3]


def test_dense_models_go_from_the_back_to_the_front():
    operators = model(1, (0, 0))
    ordered = [one.name for one in order_operators(operators, None)]
    assert ordered[0] == "output" and ordered[-1] == "embedding"
    assert ordered == [one.name for one in reversed(operators)]


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.data())
def test_an_order_names_each_operator_once(layers, per_rank, ep, data):
    operators, experts = model(per_rank * ep, (1,) * layers), per_rank * ep
    scores = {layer: [data.draw(st.integers(0, 5)) for _ in range(experts)] for layer in range(layers)}
    ordered = order_operators(operators, scores, ep)
    assert sorted(one.name for one in ordered) == sorted(one.name for one in operators)
    for count in range(0, layers * experts + 1, ep):  # no rank has more in what was saved so far
        ranks = [expert * ep // experts for _, expert in experts_of(ordered)[:count]]
        assert len({ranks.count(rank) for rank in range(ep)}) <= 1
