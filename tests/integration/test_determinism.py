"""Two runs of the same thing are one run, to the last bit."""

import pytest

from tests.integration.tiny import known, train

DROPOUT = dict(hidden_dropout=0.1, attention_dropout=0.1)


@pytest.mark.parametrize("layout", ["PP2xEP2", "TP2xEP2"])
def test_identical_runs_are_bit_identical(layout, data):
    first, second = (train(layout, data | DROPOUT) for _ in range(2))
    assert first.losses == second.losses
    assert first.norms == second.norms
    assert first.weights == second.weights


def test_dropout_changes_losses(data):
    assert train("1", data | DROPOUT).losses != known("1", data).losses


def test_another_seed_changes_losses_and_samples(data):
    first, second = known("1", data), train("1", data | dict(seed=4321))
    assert first.losses[0] != second.losses[0]
    assert first.samples[0] != second.samples[0]
