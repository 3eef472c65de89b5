"""What a stage sends again is compared bit by bit with what it sent, where that is known."""

import torch

from megatron.training.stage_replay import Comparison
from moc.logs.crossings import Crossing, Direction
from moc.store.errors import MissingRegionError

SENT = Crossing(Direction.FORWARD, chunk=0, micro_batch=1)


def test_what_is_not_the_same_to_the_last_bit_is_named():
    comparison = Comparison(lambda *_: torch.tensor([0.0, float("nan")]))
    comparison(4, SENT, torch.tensor([0.0, float("nan")]))
    comparison(5, SENT, torch.tensor([-0.0, float("nan")]))
    assert comparison.compared == 2 and comparison.different == [(5, SENT)]


def test_what_is_not_known_is_not_compared():
    def logged(iteration, crossing):
        raise MissingRegionError("it is not there")

    comparison = Comparison(logged)
    comparison(4, SENT, torch.zeros(2))
    assert comparison.compared == 0 and comparison.different == []
