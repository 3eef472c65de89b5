"""Router biases, which megatron-core moves while it reduces gradients, before the iteration is committed."""

import types
from typing import cast

import pytest
import torch
from megatron.core.optimizer import MegatronOptimizer

from megatron.pretraining.engine.optimizer import VotedOptimizer
from moc.snapshot.capture import Gate, ThreadCapturer
from moc.snapshot.copies import Copy


@pytest.fixture
def router() -> torch.nn.Module:
    router = torch.nn.Linear(2, 4)
    router.register_buffer("expert_bias", torch.tensor([1.0, 2.0, 3.0, 4.0]))
    return router


@pytest.fixture
def optimizer(router) -> VotedOptimizer:
    core = types.SimpleNamespace(chained_optimizers=[], get_loss_scale=lambda: torch.ones(()), zero_grad=lambda: None)
    return VotedOptimizer(cast(MegatronOptimizer, core), [router], clip_grad=0.0)


def move(router: torch.nn.Module) -> None:
    """As megatron-core: in place."""
    router.expert_bias.copy_(router.expert_bias + 10)


def test_a_snapshot_copied_during_the_reduction_holds_the_biases_of_its_iteration(router, optimizer):
    """Its copies have been held up until then, and the vote has not waited for them yet."""
    gate, target = Gate(), torch.zeros(4)
    gate.close()
    capture = ThreadCapturer(gate).start([Copy(router.expert_bias, target)])

    def reduce() -> None:
        move(router)
        gate.open()
        capture.wait()

    optimizer.hold_router_biases(reduce)
    assert target.tolist() == [1, 2, 3, 4]


def test_biases_move_with_the_update_and_views_of_them_stay_valid(router, optimizer):
    view = router.expert_bias
    optimizer.hold_router_biases(lambda: move(router))
    assert router.expert_bias is view and view.tolist() == [1, 2, 3, 4]
    optimizer.apply(1.0)
    assert router.expert_bias is view and view.tolist() == [11, 12, 13, 14]


def test_an_interrupted_reduction_moves_no_bias(router, optimizer):
    view = router.expert_bias

    def interrupted() -> None:
        move(router)
        raise RuntimeError("a peer is gone")

    with pytest.raises(RuntimeError, match="a peer is gone"):
        optimizer.hold_router_biases(interrupted)
    assert router.expert_bias is view and view.tolist() == [1, 2, 3, 4]
