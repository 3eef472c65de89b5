"""From which checkpoints a job can go on, and in which order they are tried."""

from hypothesis import given
from hypothesis import strategies as st

from moc.store.candidates import MEMORY, STORAGE, Candidate, candidates


def memory(iteration):
    return Candidate(iteration, MEMORY)


def storage(iteration):
    return Candidate(iteration, STORAGE)


def test_the_newest_first_and_memory_before_storage():
    found = candidates([{20: (1, ["a"]), 10: (1, ["a"])}], [5, 20, 30])
    assert found == [storage(30), memory(20), storage(20), memory(10), storage(5)]


def test_memory_counts_if_all_nodes_together_have_all_files():
    one, other = {20: (3, ["a", "b"]), 10: (3, ["a", "b"])}, {20: (3, ["c"])}
    assert candidates([one, other], []) == [memory(20)]
    assert candidates([one, {}], []) == []
    assert candidates([one, {20: (3, ["b"])}], []) == []  # the same file twice


def test_what_different_numbers_of_ranks_wrote_is_not_put_together():
    assert candidates([{20: (2, ["a"])}, {20: (3, ["b"])}], []) == []


def test_only_what_is_asked_for():
    assert candidates([{20: (1, ["a"])}], [10, 20], only=10) == [storage(10)]
    assert candidates([{20: (1, ["a"])}], [10], only=30) == []


HELD = st.dictionaries(st.integers(1, 6), st.tuples(st.integers(1, 3), st.sets(st.sampled_from("abc"), min_size=1)))


@given(st.lists(HELD, max_size=3), st.sets(st.integers(1, 6)))
def test_nothing_is_tried_that_is_not_there(memories, stored):
    found = candidates(memories, stored)
    assert found == sorted(set(found), key=lambda c: (-c.iteration, c.tier != MEMORY))
    assert {c.iteration for c in found if c.tier == STORAGE} == stored
    for candidate in found:
        held = [m[candidate.iteration] for m in memories if candidate.iteration in m]
        if candidate.tier == MEMORY:
            assert any(
                len(set().union(*(files for others, files in held if others == writers))) == writers
                for writers, _ in held
            )
