"""Windows of sparse checkpoints: MoEvement's Algorithm 1, its Figure 6, and what holds for any model."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.policy import ObservedIteration, Transfer
from moc.policy.interval import BLOCK, SNAPSHOTS, WARM_UP
from moc.policy.windows import (
    OperatorBytes,
    WindowStep,
    WindowTuner,
    activation_frequencies,
    decayed_popularity,
    find_window_size,
    generate_schedule,
    have_frequencies_changed,
    hhi,
    largest_snapshot,
    merge_schedules,
    order_operators,
    relative_popularity,
    skew_gauges,
    skewness,
)
from moc.state.operators import Operator
from tests.cases import each_row
from tests.errors import raises
from tests.model_shape import ModelShape, model_operators

FIGURE_6 = ("E1", "E2", "E3", "E4", "NE", "G")
EQUAL = [OperatorBytes(12.0, 2.0)] * 6
TABLE_7 = [(6, 2), (12, 1), (10, 1), (5, 1), (4, 1)]  # bytes of a parameter in full and as compute weights


def test_figure_6_schedule_is_reproduced():
    assert generate_schedule(FIGURE_6, 2) == [
        WindowStep(("E1", "E2"), ("E3", "E4", "NE", "G")),
        WindowStep(("E3", "E4"), ("NE", "G")),
        WindowStep(("NE", "G"), ()),
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
def test_window_matches_algorithm_1_for_equal_operators(total, full, compute, iteration_s):
    window = find_window_size([OperatorBytes(full, compute)] * total, iteration_s, bandwidth=1.0)
    expected = algorithm_1(total, full, compute, iteration_s, 1.0)
    assert (window.length, window.active) == expected or largest_snapshot(
        [OperatorBytes(full, compute)] * total, expected[1]
    ) == pytest.approx(iteration_s)  # sums in another order


operator_sizes = st.builds(lambda c, more: OperatorBytes(c + more, c), st.integers(0, 100), st.integers(0, 100))


@settings(deadline=None)
@given(st.lists(operator_sizes, min_size=1, max_size=30), st.floats(1, 2000))
def test_shortest_window_that_fits_is_found(sizes, affordable):
    window = find_window_size(sizes, affordable, bandwidth=1.0)
    assert window.length == math.ceil(len(sizes) / window.active)
    assert largest_snapshot(sizes, window.active) <= affordable or window.active <= 2
    for more in range(window.active + 1, len(sizes) + 1):
        assert largest_snapshot(sizes, more) > affordable


@settings(deadline=None)
@given(st.lists(operator_sizes, min_size=1, max_size=12), st.integers(1, 12))
def test_largest_snapshot_is_in_schedule(sizes, active):
    schedule = generate_schedule([str(number) for number in range(len(sizes))], active)
    told = [sum(sizes[int(n)].full for n in t.full) + sum(sizes[int(n)].compute for n in t.compute) for t in schedule]
    assert largest_snapshot(sizes, active) == max(told)


@each_row("bad", [([], 1.0, 1.0), (EQUAL, 0.0, 1.0), (EQUAL, 1.0, 0.0)])
def test_invalid_window_inputs_are_refused(bad):
    with raises("value-out-of-range"):
        find_window_size(*bad)


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(1, 25))
def test_operator_is_full_once_and_compute_weights_before(stages, length):
    names = [[f"{stage}.{number}" for number in range(count)] for stage, count in enumerate(stages)]
    turns = merge_schedules([generate_schedule(queue, math.ceil(len(queue) / length)) for queue in names])
    assert len(turns) <= length
    for name in (name for queue in names for name in queue):
        (place,) = (i for i, turn in enumerate(turns) if name in turn.full)
        assert [name in turn.compute for turn in turns] == [i < place for i in range(len(turns))]
    assert all(turn.full for turn in turns)


def test_windows_match_table_7():
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


def test_unpopular_experts_first_and_dense_operators_last():
    operators = model(3)
    ordered = order_operators(operators, {0: [5, 1, 4], 1: [0, 9, 4]})
    assert experts_of(ordered) == [(1, 0), (0, 1), (0, 2), (1, 2), (0, 0), (1, 1)]
    assert ordered[6:] == [one for one in operators if one.expert is None]


def test_experts_are_ordered_by_number_without_scores():
    assert experts_of(order_operators(model(2), None)) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_expert_parallel_ranks_alternate_in_order():
    ordered = order_operators(model(4, (1,)), {0: [1, 2, 3, 4]}, ep=2)
    assert [expert for _, expert in experts_of(ordered)] == [0, 2, 1, 3]


def test_dense_operators_are_ordered_back_to_front():
    operators = model(1, (0, 0))
    ordered = [one.name for one in order_operators(operators, None)]
    assert ordered[0] == "output" and ordered[-1] == "embedding"
    assert ordered == [one.name for one in reversed(operators)]


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.data())
def test_order_contains_each_operator_once(layers, per_rank, ep, data):
    operators, experts = model(per_rank * ep, (1,) * layers), per_rank * ep
    scores = {layer: [data.draw(st.integers(0, 5)) for _ in range(experts)] for layer in range(layers)}
    ordered = order_operators(operators, scores, ep)
    assert sorted(one.name for one in ordered) == sorted(one.name for one in operators)
    for count in range(0, layers * experts + 1, ep):  # no rank has more in what was saved so far
        ranks = [expert * ep // experts for _, expert in experts_of(ordered)[:count]]
        assert len({ranks.count(rank) for rank in range(ep)}) <= 1


def test_skewness_ranges_from_0_to_1():
    assert hhi([5, 5, 5, 5]) == pytest.approx(1 / 4) and skewness([5, 5, 5, 5]) == pytest.approx(0)
    assert hhi([0, 0, 7, 0]) == 1 and skewness([0, 0, 7, 0]) == 1


def test_skewness_matches_manual_calculation():
    assert hhi([3, 1]) == pytest.approx(9 / 16 + 1 / 16)
    assert skewness([3, 1]) == pytest.approx((10 / 16 - 1 / 2) / (1 / 2))


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=64).filter(any))
def test_skewness_is_between_0_and_1(counts):
    assert -1e-9 <= skewness(counts) <= 1 + 1e-9


@each_row("counts", [[], [4], [0, 0]])
def test_skewness_of_invalid_counts_is_refused(counts):
    with raises("counts-misfit"):
        skewness(counts)


def test_gauges_are_means_over_layers_with_tokens():
    assert skew_gauges({0: [1, 1], 1: [2, 0], 2: [0, 0], 3: [7]}) == {"hhi": 0.75, "skewness": 0.5}
    assert skew_gauges({}) == {} == skew_gauges({0: [0, 0]})


def test_order_changes_if_25_percent_of_experts_change_by_10():
    before = activation_frequencies({0: [100, 100, 100, 100], 1: [100, 100, 100, 100]})
    assert not have_frequencies_changed(before, before)
    two = activation_frequencies({0: [112, 88, 100, 100], 1: [100, 100, 100, 100]})
    assert have_frequencies_changed(before, two)
    assert not have_frequencies_changed(
        before, activation_frequencies({0: [110, 90, 100, 100], 1: [100, 100, 100, 100]})
    )
    one = {0: [0.25 * 1.2, 0.25, 0.25, 0.25], 1: [0.25] * 4}
    assert not have_frequencies_changed(before, one)
    assert not have_frequencies_changed({}, {})


@each_row(
    ("now", "changed"),
    [
        ([11.0, 9.0, 10.0, 10.0], False),  # by 10 % and no more
        ([11.5, 10.0, 10.0, 10.0], True),  # one of four is 25 %
        ([8.5, 10.0, 10.0, 10.0], True),
        ([11.5, 10.0, 10.0, 10.0, 10.0], False),
    ],
)
def test_frequency_change_respects_thresholds(now, changed):
    assert have_frequencies_changed({0: [10.0] * len(now)}, {0: now}) == changed
    nothing = {0: [0.0] * len(now)}
    assert not have_frequencies_changed(nothing, nothing) and have_frequencies_changed(nothing, {0: now})


def test_frequencies_are_shares_of_layer():
    assert activation_frequencies({0: [1, 3], 1: [0, 0]}) == {0: [0.25, 0.75], 1: [0.0, 0.0]}


def test_decayed_popularity_forgets_old_tokens():
    first = decayed_popularity({}, {0: [100, 0]}, alpha=0.9)
    assert first == {0: [pytest.approx(10.0), 0.0]}
    assert decayed_popularity(first, {0: [0, 20]}, alpha=0.9) == {0: [pytest.approx(9.0), pytest.approx(2.0)]}


def test_popularity_is_relative_to_capacity():
    assert relative_popularity({0: [6, 6]}, {0: (3, 1)}) == {0: [2, 6]}


def seen(seconds, size=0.0, took=0.0):
    return ObservedIteration(seconds + 1.0, forward_backward_s=seconds, copied=Transfer(size, took))


def measured(tuner, *seconds):
    for one in seconds:
        tuner.observe(seen(one))
    return tuner


def test_warmup_is_skipped_and_block_is_measured():
    tuner = measured(WindowTuner(), *[90.0] * WARM_UP)
    assert tuner.seconds is None and not tuner.is_due(WARM_UP)
    measured(tuner, *[2.0] * (BLOCK - 1))
    assert not tuner.is_due(WARM_UP + BLOCK - 1) and tuner.seconds == 2.0
    measured(tuner, 2.0)
    assert not tuner.is_due(0) and all(tuner.is_due(iteration) for iteration in (1, WARM_UP + BLOCK, 1000))


def test_window_tuner_uses_median_of_newest_iterations():
    tuner = measured(WindowTuner(), *[9.0] * WARM_UP, *[5.0] * BLOCK, *[1.0] * (BLOCK // 2 + 1))
    assert tuner.seconds == 1.0
    measured(tuner, 0.0)  # nothing was measured
    assert tuner.seconds == 1.0 and tuner.is_due(1)


def test_bandwidth_is_known_after_first_copy():
    tuner = WindowTuner()
    assert tuner.bandwidth is None
    for size, took in ((80.0, 0.0), (0.0, 2.0), (80.0, 2.0), (60.0, 2.0), (30.0, 3.0)):
        tuner.observe(seen(1.0, size, took))  # what has no bytes or took no time tells nothing
    assert SNAPSHOTS == 3 and tuner.bandwidth == 30.0
    tuner.observe(seen(1.0, 5.0, 1.0))
    assert tuner.bandwidth == 10.0


def test_resumed_run_keeps_measurements():
    tuner = measured(WindowTuner(), *[9.0] * WARM_UP, *[5.0] * BLOCK)
    tuner.observe(seen(5.0, 80.0, 2.0))
    state = json.loads(json.dumps(tuner.state_dict()))
    for resumed in (WindowTuner(), tuner):
        resumed.load_state_dict(state)
        assert (resumed.seconds, resumed.bandwidth, resumed.is_due(1)) == (5.0, 40.0, True)
        assert resumed.state_dict() == state
        measured(resumed, *[90.0] * WARM_UP)
        assert resumed.state_dict() == state
        measured(resumed, *[90.0] * (BLOCK // 2 + 1))
        assert resumed.seconds == 90.0
    empty = WindowTuner()
    empty.load_state_dict({})  # of another tuner
    assert empty.seconds is None and empty.bandwidth is None and not empty.is_due(1)
    for wrong in ({"bandwidths": ["x"]}, {"forward_backward_s": 3}, []):
        with raises("saved-state-invalid"):
            empty.load_state_dict(wrong)


def test_limit_shortens_only_longer_windows():
    tuner = WindowTuner()
    assert tuner.limit(9) == 9
    tuner.limit_window_length(4)
    assert [tuner.limit(length) for length in (3, 4, 9)] == [3, 4, 4]
