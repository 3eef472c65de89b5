"""Sequential selection: balanced over ranks in every checkpoint, and no expert is forgotten."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moc.policy.pec_selection import sequential_experts
from tests.errors import raises


@st.composite
def rotations(draw):
    """(K, experts of a layer, expert-parallel ranks, layers with experts)."""
    ep, per_rank = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    return draw(st.integers(1, ep * per_rank)), ep * per_rank, ep, draw(st.integers(1, 12))


def test_the_papers_figure_4():
    first, second = ([sequential_experts(t, layer, 1, 3, 3) for layer in range(4)] for t in (0, 1))
    assert first == [[0], [1], [2], [0]]
    assert second == [[1], [2], [0], [1]]


@given(rotations(), st.integers(0, 10**6), st.integers(0, 100))
def test_ranks_differ_by_at_most_one_expert_in_any_layers_that_follow_each_other(rotation, checkpoint, first):
    k, experts, ep, layers = rotation
    owners = Counter()
    for layer in range(first, first + layers):
        chosen = sequential_experts(checkpoint, layer, k, experts, ep)
        assert len(set(chosen)) == k and all(0 <= e < experts for e in chosen)
        owners.update(e * ep // experts for e in chosen)
    assert max(owners[r] for r in range(ep)) - min(owners[r] for r in range(ep)) <= 1


@given(rotations(), st.integers(0, 50), st.integers(0, 11))
def test_every_expert_is_saved_within_one_rotation(rotation, start, layer):
    k, experts, ep, _ = rotation
    rounds = -(-experts // k)
    saved = {e for t in range(start, start + rounds) for e in sequential_experts(t, layer, k, experts, ep)}
    assert saved == set(range(experts))


@pytest.mark.parametrize("k", [0, 9])
def test_k_must_fit(k):
    with raises("experts-per-snapshot-invalid", f"K = {k}", " 8"):
        sequential_experts(0, 0, k, 8, 2)
