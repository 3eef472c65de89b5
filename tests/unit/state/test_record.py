"""What is known of iterations: the records of late, how far a run is, and the mean over tokens."""

import pytest

from moc.state.record import Position, Records, StepRecord, mean_loss


def record(iteration, samples=8, skipped=False):
    return StepRecord(iteration, 2.5, 1.0, 1.0, skipped, tokens=128, learning_rate=0.1, samples=samples)


def test_only_newest_records_are_retained():
    records = Records(max_records=3)
    for iteration in (5, 6, 7):
        records.add(record(iteration))
    assert records.iterations() == [5, 6, 7]
    records.add(record(8))
    assert records.iterations() == [6, 7, 8] and [one.iteration for one in records.of([8, 6])] == [8, 6]
    with pytest.raises(KeyError):
        records.of([5])
    many = Records()
    for iteration in range(1, 1026):
        many.add(record(iteration))
    assert many.iterations() == list(range(2, 1026))


def test_replayed_iteration_has_one_record():
    records = Records()
    for samples in (8, 16):
        records.add(record(3, samples))
    assert [one.samples for one in records.of(records.iterations())] == [16]


def test_position_counts_samples_and_skipped_iterations():
    assert Position() == Position(0, 0, 0)
    after = Position(4, 32, 1).after(record(5, samples=16, skipped=True))
    assert after == Position(5, 48, 2)
    assert after.after(record(6)) == Position(6, 56, 2)


def test_mean_loss_is_over_tokens():
    assert mean_loss({"loss_sum": 6.0, "loss_tokens": 4.0}) == 1.5
    assert mean_loss({"loss_sum": 6.0, "loss_tokens": 1.0}) == 6.0
    assert mean_loss({"loss_sum": 0.0, "loss_tokens": 0.0}) == 0.0  # every label was masked
