"""Budgets are told from the rank, and the node, that has the most to save."""

from moc.policy.budgets import Sizes, fitting
from moc.policy.pec_state import PecState

SIZES = Sizes({0: 10}, {(1, 0): {0: 4}, (1, 1): {1: 8}, (2, 0): {1: 3, 2: 3}}, (0, 0, 1), 2)


def test_the_busiest_rank_is_that_of_most_dense_bytes_and_its_largest_expert():
    assert SIZES.busiest == (0, 4)
    assert Sizes({0: 10, 1: 7}, SIZES.experts).busiest == (1, 8)


def test_the_smallest_budgets_leave_room_for_an_expert_beside_dense_operators():
    assert SIZES.least_of_rank == 10 + 4
    assert SIZES.least_of_node == 2 * (10 + 8)
    assert SIZES.of_ranks == {0: 14, 1: 11, 2: 3}


def test_k_is_unchanged_until_faults_raise_it():
    assert PecState().k == 0


def test_as_many_equally_popular_experts_fit_as_every_rank_has_room_for():
    sizes = Sizes({}, {(1, number): {number % 2: 4} for number in range(6)})
    assert fitting({1: 6}, [sizes.by_rank(8.0)]) == 4
    assert fitting({1: 6}, [sizes.by_rank(8.0), sizes.number(3)]) == 3
