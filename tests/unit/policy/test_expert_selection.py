"""Which experts a selective snapshot holds: MoEtion's Algorithm 1, the choice per byte, and the risk that remains."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moc.policy.expert_selection import (
    Limit,
    allocate_experts,
    count_limit,
    per_byte,
    proportional,
    scores,
    steady_risk,
)
from moc.policy.selective_choice import default_max_age
from tests.cases import each_row

MANY = 10**9


@st.composite
def tables(draw, most=60):
    """Tokens by layer and expert; layers may differ in their number of experts."""
    rows = draw(st.lists(st.lists(st.integers(0, most), min_size=1, max_size=6), min_size=1, max_size=5))
    return dict(enumerate(rows))


def places(table):
    return [(layer, expert) for layer, row in table.items() for expert in range(len(row))]


def chosen_of(experts):
    return [(layer, expert) for layer, row in experts.items() for expert in row]


def test_layer_shares_are_proportional_to_tokens_at_risk():
    assert allocate_experts({0: [30, 0, 0], 1: [5, 5, 0], 2: [10, 10, 0]}, 6) == {0: 3, 1: 1, 2: 2}
    assert allocate_experts({0: [7, 0], 1: [3, 0]}, 1) == {0: 1, 1: 0}


def test_shares_are_rounded_by_remainder_then_layer():
    assert allocate_experts({0: [1, 1], 1: [2, 2], 2: [2, 2]}, 3) == {0: 1, 1: 1, 2: 1}  # 0.6, 1.2 and 1.2
    assert allocate_experts({0: [5, 5], 1: [5, 5], 2: [5, 5]}, 4) == {0: 2, 1: 1, 2: 1}


def test_unused_share_of_layer_goes_to_other_layers():
    assert allocate_experts({0: [98, 0], 1: [1, 0, 0], 2: [1, 0, 0]}, 5) == {0: 2, 1: 2, 2: 1}
    assert allocate_experts({0: [5], 1: [5, 5]}, 9) == {0: 1, 1: 2}


def test_without_tokens_at_risk_layers_share_equally():
    assert allocate_experts({0: [0, 0], 1: [0, 0]}, 3) == {0: 2, 1: 1}
    assert allocate_experts({0: [4, 4], 1: [0, 0], 2: [0, 0]}, 4) == {0: 2, 1: 1, 2: 1}


@given(tables(), st.integers(0, 40))
def test_experts_of_all_layers_add_up_to_budget(table, total):
    given_ = allocate_experts(table, total)
    assert sum(given_.values()) == min(total, len(places(table)))
    assert all(0 <= given_[layer] <= len(table[layer]) for layer in table)


def test_algorithm_1_selects_most_tokens_per_layer():
    unsaved = {0: [3, 9, 3, 0], 1: [1, 2, 2, 0]}
    assert proportional(unsaved, [count_limit(places(unsaved), 4)]) == {0: [0, 1, 2], 1: [1]}


@st.composite
def budgets(draw, table):
    """Limits on ranks, each expert on one or two of them, and on a number of experts."""
    kinds = draw(st.lists(st.dictionaries(st.integers(0, 2), st.integers(1, 9), min_size=1, max_size=2), min_size=1))
    cost = {place: draw(st.sampled_from(kinds)) for place in places(table)}
    room = {rank: draw(st.integers(0, 40)) for rank in range(3)}
    return [Limit(room, cost), count_limit(places(table), draw(st.integers(0, 30)))]


@given(st.data(), tables(), st.integers(1, 5))
def test_budgets_are_kept_and_filled(data, table, max_age):
    limits = data.draw(budgets(table))
    ages = {layer: [data.draw(st.integers(0, 9)) for _ in row] for layer, row in table.items()}
    for experts in (proportional(table, limits), per_byte(table, ages, max_age, limits)):
        chosen = chosen_of(experts)
        assert len(set(chosen)) == len(chosen) and experts.keys() == table.keys()
        assert all(row == sorted(row) for row in experts.values())
        used = [
            {key: sum(limit.costs[place].get(key, 0) for place in chosen) for key in limit.capacity} for limit in limits
        ]
        assert all(
            total[key] <= limit.capacity[key] for limit, total in zip(limits, used, strict=True) for key in total
        )
    left = set(places(table)) - set(chosen)  # by the choice per byte
    for place in left:
        assert any(
            total[key] + cost > limit.capacity[key]
            for limit, total in zip(limits, used, strict=True)
            for key, cost in limit.costs[place].items()
        )


class PlainRooms:
    """What is left of limits, expert by expert and bin by bin."""

    def __init__(self, limits, share):
        self.limits, self.left = limits, [{key: share * room for key, room in one.capacity.items()} for one in limits]

    def take(self, place):
        bins = [
            (left, *of) for limit, left in zip(self.limits, self.left, strict=True) for of in limit.costs[place].items()
        ]
        if any(left[key] < cost for left, key, cost in bins):
            return False
        for left, key, cost in bins:
            left[key] -= cost
        return True


def plain_per_byte(table, ages, max_age, limits):
    old = sorted(
        (one for one in places(table) if ages[one[0]][one[1]] > max_age), key=lambda one: -ages[one[0]][one[1]]
    )
    rooms = PlainRooms(limits, 0.5)
    chosen = {one for one in old if rooms.take(one)}
    for left, limit in zip(rooms.left, limits, strict=True):
        left.update({key: left[key] + 0.5 * room for key, room in limit.capacity.items()})
    waiting = sorted((one for one in places(table) if one not in chosen), key=lambda one: -table[one[0]][one[1]])
    chosen |= {one for one in waiting if rooms.take(one)}
    return {layer: [expert for expert in range(len(row)) if (layer, expert) in chosen] for layer, row in table.items()}


def plain_proportional(table, limits):
    rooms, chosen = PlainRooms(limits, 1.0), {}
    for layer, number in allocate_experts(table, min(limit.expert_count() for limit in limits)).items():
        ordered = sorted(range(len(table[layer])), key=lambda expert: (-table[layer][expert], expert))
        fitting = (expert for expert in ordered if rooms.take((layer, expert)))
        chosen[layer] = sorted(itertools.islice(fitting, number))
    return chosen


@given(st.data(), tables(most=5), st.integers(1, 5))
def test_selection_matches_plain_algorithm(data, table, max_age):
    """Of which many have equal scores, and costs in common."""
    limits = data.draw(budgets(table))
    limits = data.draw(st.sampled_from([limits, limits[::-1], limits[:1], [*limits, limits[1]]]))  # one also twice
    ages = {layer: [data.draw(st.integers(0, 9)) for _ in row] for layer, row in table.items()}
    for _ in range(2):  # what is known of limits is kept
        assert per_byte(table, ages, max_age, limits) == plain_per_byte(table, ages, max_age, limits)
        assert proportional(table, limits) == plain_proportional(table, limits)


def test_oldest_experts_use_at_most_half_of_budget():
    score = {0: [9.0, 8.0, 7.0, 0.0, 0.0, 0.0]}
    ages, limits = {0: [1, 1, 1, 11, 13, 12]}, [count_limit(places(score), 4)]
    assert per_byte(score, ages, 10, limits) == {0: [0, 1, 4, 5]}
    assert per_byte(score, ages, 20, limits) == {0: [0, 1, 2, 3]}
    assert per_byte(score, ages, 10, [count_limit(places(score), 1)]) == {0: [0]}  # half an expert is none


def test_expert_of_full_rank_is_skipped_for_rank_with_room():
    cost = {(0, 0): {0: 5}, (0, 1): {0: 5}, (0, 2): {1: 5}}
    limits = [Limit({0: 6, 1: 6}, cost)]
    assert per_byte({0: [9.0, 8.0, 1.0]}, {0: [0, 0, 0]}, MANY, limits) == {0: [0, 2]}
    assert proportional({0: [9, 8, 1]}, limits) == {0: [0, 2]}
    assert limits[0].expert_count() == 2 and Limit({}, {}).expert_count() == 0


def test_score_increases_with_tokens_and_age():
    assert scores({0: [4, 0, 2]}, {0: [0, 9, 3]}, "tokens") == {0: [4.0, 0.0, 2.0]}
    assert scores({0: [4, 0, 2]}, {0: [0, 9, 3]}, "tokens-age") == {0: [4.0, 0.0, 8.0]}


def test_steady_risk_matches_manual_calculation():
    assert steady_risk([4.0, 4.0], 1) == pytest.approx(4.0)  # each every second time, when it has 4 or none
    assert steady_risk([5.0, 5.0, 0.0], 2) == 0.0 and steady_risk([5.0], 0) == math.inf and steady_risk([], 0) == 0.0
    # the busiest one always, the others in turn
    assert steady_risk([1000.0, 1.0, 1.0], 2) == pytest.approx(1.0)
    # all three always at a third each; at a half each, the busiest always, and the others every fourth time
    assert steady_risk([9.0, 9.0, 9.0], 1, always=1 / 3) == 0.0
    assert steady_risk([1000.0, 1.0, 1.0], 1, always=1 / 2) == pytest.approx(3.0)


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=8), st.integers(1, 6))
def test_steady_risk_is_lower_bound_of_random_intervals(rates, number):
    """Random intervals that keep to the budget are tried."""
    least, draw = steady_risk(rates, number), random.Random(0)
    for _ in range(50):
        shares = [draw.random() for _ in rates]
        scale = number / sum(shares)
        shares = [min(1.0, share * scale) for share in shares]
        assert sum(rate * (1 / share - 1) / 2 for rate, share in zip(rates, shares, strict=True)) >= least * (1 - 1e-9)


def at_risk(trace, experts, choose, skip=10):
    """Tokens at risk right after each snapshot, in iterations: the mean over layers, and rows after the first."""
    layers, width = len(trace[0]), len(trace[0][0])
    unsaved, ages = ({layer: [0] * width for layer in range(layers)} for _ in range(2))
    limits, found = [count_limit(places(unsaved), experts * layers)], []
    for row in trace:
        for layer, tokens in enumerate(row):
            unsaved[layer] = [sum(pair) for pair in zip(unsaved[layer], tokens, strict=True)]
        chosen = choose(unsaved, ages, limits)
        for layer in unsaved:
            ages[layer] = [age + 1 for age in ages[layer]]
            for expert in chosen[layer]:
                unsaved[layer][expert] = ages[layer][expert] = 0
        found.append(sum(map(sum, unsaved.values())) / layers / sum(trace[0][0]))
    return sum(found[skip:]) / len(found[skip:])


@each_row(("experts", "paper", "ours"), [(2, 4.83, 2.61), (4, 1.94, 1.03), (8, 0.490, 0.276), (13, 0.106, 0.055)])
def test_recorded_loads_risk_fewer_tokens_than_algorithm_1(trace, experts, paper, ours):
    by_rule, by_age = by_both(trace, experts)
    assert by_rule == pytest.approx(paper, rel=0.03) and by_age == pytest.approx(ours, rel=0.03)
    assert by_age < 0.6 * by_rule
    assert steady(trace, experts) == pytest.approx(by_age, rel=0.15)


@each_row("experts", [2, 4, 8, 13])
def test_last_fifth_of_loads_has_fewer_tokens_at_risk(trace, experts):
    """Of a run under way: at the start of one all experts are new, and both rules choose the popular ones."""
    skip = len(trace) - len(trace) // 5
    by_rule, by_age = by_both(trace, experts, skip)
    assert by_age < 0.6 * by_rule
    assert steady(trace, experts, skip) == pytest.approx(by_age, rel=0.15)


@each_row("experts", [2, 4, 8])
@each_row(("start", "most"), [("cold", 0.75), ("warm", 0.6)])
def test_default_age_limit_leaves_fewer_tokens_at_risk(trace, experts, start, most):
    """Both rules save the same number of states; a warm start has replayed the first half of the recording."""
    rows, skip = (trace[:100], 10) if start == "cold" else (trace, len(trace) // 2)
    limits = [count_limit(places(dict(enumerate(trace[0]))), experts * len(trace[0]))]
    limit = default_max_age(len(trace[0]) * len(trace[0][0]), 1, limits, gradients=False)
    by_rule, by_age = by_both(rows, experts, skip)
    _, limited = by_both(rows, experts, skip, limit)
    assert limited < most * by_rule
    assert limited < 1.06 * by_age


def by_both(trace, experts, skip=10, max_age=MANY):
    """Tokens at risk by Algorithm 1, and by tokens times age."""
    by_rule = at_risk(trace, experts, lambda unsaved, ages, limits: proportional(unsaved, limits), skip)
    by_age = at_risk(
        trace,
        experts,
        lambda unsaved, ages, limits: per_byte(scores(unsaved, ages, "tokens-age"), ages, max_age, limits),
        skip,
    )
    return by_rule, by_age


def steady(trace, experts, skip=10):
    """The mean over rows of the least risk in a steady state with each, since popularity drifts."""
    rates = [[tokens for layer in row for tokens in layer] for row in trace[skip:]]
    each = len(trace[0]) * sum(trace[0][0])
    return sum(steady_risk(row, experts * len(trace[0])) / each for row in rates) / len(rates)
