"""Which rank trains on which micro batch."""

from moc.elastic.batches import micro_batches_of, rounds, speed


def test_each_micro_batch_is_trained_on_once_and_ranks_run_equally_many():
    for micro_batches in range(1, 20):
        for ranks in range(1, 9):
            of = [micro_batches_of(rank, micro_batches, ranks) for rank in range(ranks)]
            assert {len(numbers) for numbers in of} == {rounds(micro_batches, ranks)}
            assert sorted(n for numbers in of for n in numbers if n is not None) == list(range(micro_batches))
            assert all(None not in numbers[:-1] for numbers in of)  # ghosts are in the last round
            assert all(n % ranks == rank for rank, numbers in enumerate(of) for n in numbers if n is not None)


def test_by_hand():
    assert micro_batches_of(2, 5, 3) == [2, None]
    assert speed(60, ranks=5, before=6) == 10 / 12


def test_whoever_helps_has_a_ghost_in_each_round():
    assert micro_batches_of(3, 5, 3) == micro_batches_of(4, 5, 3) == [None, None]
