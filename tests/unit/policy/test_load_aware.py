"""Load-aware selection: PEC's Algorithm 1, step by step, and exactly K of each layer whatever the load."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moc.policy.pec_selection import load_aware_experts
from tests.errors import raises


@st.composite
def loads(draw):
    """(unsaved tokens by layer, K, expert-parallel ranks)."""
    ep, per_rank = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    layers = draw(st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True))
    tokens = st.lists(st.integers(0, 9), min_size=ep * per_rank, max_size=ep * per_rank)
    return {layer: draw(tokens) for layer in layers}, draw(st.integers(1, ep * per_rank)), ep


def given_by_rank(chosen, experts, ep):
    return Counter(expert * ep // experts for layer in chosen.values() for expert in layer)


@given(loads())
def test_exactly_k_of_each_layer(case):
    unsaved, k, ep = case
    chosen = load_aware_experts(unsaved, k, ep)
    assert list(chosen) == list(unsaved)
    for layer, experts in chosen.items():
        assert experts == sorted(set(experts)) and len(experts) == k
        assert all(0 <= expert < len(unsaved[layer]) for expert in experts)


@given(loads())
def test_the_busiest_are_chosen_where_no_rank_is_full(case):
    unsaved, k, _ = case
    for layer, chosen in load_aware_experts(unsaved, k, 1).items():
        ranking = sorted(range(len(unsaved[layer])), key=lambda e: (-unsaved[layer][e], e))
        assert chosen == sorted(ranking[:k])


@given(loads())
def test_capacity_is_exceeded_only_where_a_layer_leaves_no_other_choice(case):
    unsaved, k, ep = case
    chosen = load_aware_experts(unsaved, k, ep)
    capacity, so_far = -(-len(unsaved) * k // ep), Counter()
    for layer in sorted(unsaved, reverse=True):
        per_rank, before = len(unsaved[layer]) // ep, Counter(so_far)
        so_far.update(expert // per_rank for expert in chosen[layer])
        over = [rank for rank in range(ep) if so_far[rank] > max(capacity, before[rank])]
        if over:
            for rank in range(ep):  # all that the others had room for is taken
                assert so_far[rank] >= min(capacity, before[rank] + per_rank)


def test_algorithm_1_by_hand():
    """Two ranks of two experts, K = 1: each rank has room for one of the two layers.

    The last layer takes its busiest, on rank 1; so the first layer takes the busiest of rank 0, though rank 1 has one
    with more.
    """
    assert load_aware_experts({1: [1, 2, 9, 8], 3: [5, 6, 7, 7]}, k=1, ep=2) == {1: [1], 3: [2]}


def test_from_the_last_layer_to_the_first_whatever_their_order():
    unsaved = {1: [0, 9], 3: [0, 9]}
    assert load_aware_experts(unsaved, 1, 2) == {1: [0], 3: [1]}
    assert load_aware_experts(dict(reversed(unsaved.items())), 1, 2) == {3: [1], 1: [0]}


def test_a_full_rank_gives_more_rather_than_that_a_layer_saves_less():
    """Three ranks with one expert each, K = 2 and three layers: room for two of each rank.

    Layers 2 and 1 fill ranks 0 and 1; layer 0 finds room on rank 2 alone.  Rank 1 has more unsaved tokens than rank 0.
    """
    unsaved = {0: [1, 2, 0], 1: [9, 9, 0], 2: [9, 9, 0]}
    assert load_aware_experts(unsaved, 2, 3) == {0: [1, 2], 1: [0, 1], 2: [0, 1]}


def test_of_full_ranks_the_one_that_gave_least_gives_more():
    """The same with six layers and room for four: layers 1 and 0 both need a rank that is full."""
    unsaved = {layer: [9, 8, 0] for layer in range(6)}
    chosen = load_aware_experts(unsaved, 2, 3)
    assert chosen == {0: [1, 2], 1: [0, 2]} | {layer: [0, 1] for layer in range(2, 6)}
    assert given_by_rank(chosen, 3, 3) == {0: 5, 1: 5, 2: 2}


@pytest.mark.parametrize(
    ("k", "ep", "code", "named"),
    [
        (0, 1, "experts-per-snapshot-invalid", ["K = 0", "layer 7", "4"]),
        (5, 2, "experts-per-snapshot-invalid", ["K = 5"]),
        (1, 3, "experts-not-divisible", ["ep = 3"]),
    ],
)
def test_what_does_not_fit_is_refused(k, ep, code, named):
    with raises(code, *named):
        load_aware_experts({7: [1, 2, 3, 4]}, k, ep)
