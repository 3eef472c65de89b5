"""Counts of updates, which Adam corrects its bias by, wherever an optimizer keeps them."""

from types import SimpleNamespace
from typing import Any

import torch

from megatron.pretraining.process import cpu

cpu.install()

from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer  # noqa: E402

from megatron.pretraining.checkpoint.contents import grad_scaler_state  # noqa: E402
from megatron.pretraining.engine.optimizer import CommitOptimizer  # noqa: E402
from megatron.pretraining.engine.owned import get_step, owned_slices, set_step  # noqa: E402
from tests.cases import each_row  # noqa: E402


class FusedAdam(torch.optim.Optimizer):
    """Counts as Transformer Engine's and apex's fused Adam do: in the group, from the first update on."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1


def wrapped(make, name):
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    inner = make([{"params": parameters}])
    return inner, ChainedOptimizer([FP32Optimizer(inner, OptimizerConfig(optimizer=name, lr=0.1), lambda *_: None)])


@each_row("make", [torch.optim.AdamW, FusedAdam])
def test_new_optimizer_continues_saved_step_count(make):
    inner, optimizer = wrapped(make, "adam")
    list(owned_slices(optimizer))  # makes the moments, as saving and loading do
    assert get_step(optimizer) == 0
    set_step(optimizer, 7)
    assert get_step(optimizer) == 7
    inner.step()
    assert get_step(optimizer) == 8


def test_sgd_has_no_step_count():
    inner, optimizer = wrapped(lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9), "sgd")
    set_step(optimizer, 7)
    inner.step()
    assert get_step(optimizer) == 0
    assert "step" not in inner.param_groups[0]


def test_fused_optimizer_counts_on_device_of_masters():
    """Its kernel reads the count there, and not in host memory."""
    master = torch.nn.Parameter(torch.ones(3, device="meta"))
    inner = torch.optim.AdamW([{"params": [master], "fused": True}])
    optimizer = ChainedOptimizer([FP32Optimizer(inner, OptimizerConfig(optimizer="adam", lr=0.1), lambda *_: None)])
    list(owned_slices(optimizer))
    assert inner.state[master]["step"].device.type == "meta"


class Scale:
    """A loss scale on a device, whose reads are counted."""

    def __init__(self, value):
        self.value, self.reads = value, 0

    def item(self):
        self.reads += 1
        return self.value


def test_loss_scale_is_read_once_after_each_change():
    scale = Scale(8.0)
    core: Any = SimpleNamespace(get_loss_scale=lambda: scale)
    optimizer = CommitOptimizer(core, [], clip_grad=1.0)
    assert [optimizer.loss_scale for _ in range(3)] == [8.0] * 3 and scale.reads == 1
    scale = Scale(4.0)  # megatron-core replaces the tensor
    assert optimizer.loss_scale == 4.0 and scale.reads == 1
    scaler = SimpleNamespace(state_dict=lambda: {"scale": scale, "growth_tracker": 3})
    optimizer.core = SimpleNamespace(get_loss_scale=lambda: scale, is_stub_optimizer=False, grad_scaler=scaler)
    assert grad_scaler_state(optimizer) == {"scale": [4.0], "growth_tracker": 3} and scale.reads == 1
