"""Committed copies of module state, which iterations change before they are committed."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.pretraining.process import cpu

cpu.install()  # comes before megatron.core
from megatron.pretraining.engine import module_state  # noqa: E402
from megatron.pretraining.engine.module_state import ModuleState, operator_of_module, paths_of  # noqa: E402
from moc.snapshot.device_copy import (  # noqa: E402
    Copy,  # noqa: E402
    Gate,
    ThreadCapturer,
)
from moc.state.module_bytes import ModuleStateError  # noqa: E402
from moc.state.operators import is_module_state, operator_of  # noqa: E402
from tests.cases import each_row  # noqa: E402

OPERATOR = "layers.4.router"


class Router(torch.nn.Linear):
    """Has a bias that the reduction of gradients moves."""

    def __init__(self):
        super().__init__(2, 4)
        self.register_buffer("expert_bias", torch.tensor([1.0, 2.0, 3.0, 4.0]))


Router.__module__ = "megatron.core.transformer.moe.router"


class UserRouter(Router):
    """Of a user, with a counter."""

    def __init__(self):
        super().__init__()
        self.calls, self.mean = 0, torch.zeros(2)


def model_of(router: torch.nn.Module, experts: int = 2) -> torch.nn.Module:
    """A chunk with one layer, the fifth of its model, and its third and fourth experts."""
    model: Any = torch.nn.Module()
    layer: Any = torch.nn.Module()
    layer.layer_number, layer.mlp = 5, torch.nn.Module()
    layer.mlp.router, layer.mlp.experts = router, torch.nn.Module()
    layer.mlp.experts.local_experts = torch.nn.ModuleList(torch.nn.Module() for _ in range(experts))
    layer.mlp.local_expert_indices = [2, 3]
    model.decoder = torch.nn.Module()
    model.decoder.layers = torch.nn.ModuleList([layer])
    return model


@pytest.fixture
def state(monkeypatch) -> tuple[ModuleState, Any]:
    return built(monkeypatch, Router())


@pytest.fixture
def of_user(monkeypatch) -> tuple[ModuleState, Any]:
    return built(monkeypatch, UserRouter())


def built(monkeypatch, router: Any) -> tuple[ModuleState, Any]:
    monkeypatch.setattr(module_state, "buffer_pieces", lambda models: {router.expert_bias: []})
    stage = SimpleNamespace(rank=lambda: 6)
    groups = SimpleNamespace(get_tensor_and_data_parallel_group=lambda with_context_parallel: stage)
    monkeypatch.setattr(module_state, "parallel_state", groups)
    return ModuleState([model_of(router)]), router


def move(router: torch.nn.Module) -> None:
    """In place, as megatron-core does."""
    router.expert_bias.copy_(router.expert_bias + 10)


def test_snapshot_copied_during_reduction_holds_committed_biases(state):
    """The copy is held up until the reduction, and the update has not waited for it yet."""
    modules, router = state
    gate, target = Gate(), torch.zeros(4)
    gate.close()
    capture = ThreadCapturer(gate).start([Copy(modules.committed[router.expert_bias], target)])
    try:
        modules.begin()
        move(router)
    finally:
        gate.open()
    capture.wait()
    assert target.tolist() == [1, 2, 3, 4]


def test_commit_moves_biases_and_keeps_views_valid(state):
    modules, router = state
    live, view = router.expert_bias, modules.committed[router.expert_bias]
    modules.begin()
    move(router)
    modules.commit()
    assert router.expert_bias is live and live.tolist() == view.tolist() == [11, 12, 13, 14]


@pytest.mark.parametrize("end", [ModuleState.discard, ModuleState.suspend, ModuleState.begin])
def test_interrupted_iteration_moves_no_bias(end, state):
    modules, router = state
    modules.begin()
    move(router)
    end(modules)
    assert router.expert_bias.tolist() == modules.committed[router.expert_bias].tolist() == [1, 2, 3, 4]


def test_suspended_iteration_is_completed_by_commit(state):
    modules, router = state
    modules.begin()
    move(router)
    modules.suspend()
    modules.commit()
    assert router.expert_bias.tolist() == modules.committed[router.expert_bias].tolist() == [11, 12, 13, 14]


def test_loaded_state_supersedes_suspended_iteration(state):
    modules, router = state
    modules.begin()
    move(router)
    modules.suspend()
    modules.committed[router.expert_bias].fill_(7)
    modules.loaded(router.expert_bias)
    modules.commit()
    assert router.expert_bias.unique().tolist() == [7]


def test_biases_of_frozen_router_are_unchanged(state):
    modules, router = state
    router.requires_grad_(False)
    modules.begin()
    move(router)
    modules.commit()
    assert router.expert_bias.tolist() == modules.committed[router.expert_bias].tolist() == [1, 2, 3, 4]


def test_skipped_update_moves_no_bias_and_keeps_other_values(of_user):
    modules, router = of_user
    modules.begin()
    move(router)
    router.calls += 1
    modules.commit(skipped=True)
    assert router.expert_bias.tolist() == modules.committed[router.expert_bias].tolist() == [1, 2, 3, 4]
    assert router.calls == 1


def test_evaluation_changes_no_module_state(of_user):
    modules, router = of_user
    with modules.unchanged():
        move(router)
        router.calls += 1
        router.appeared = 1
    assert router.expert_bias.tolist() == [1, 2, 3, 4] and router.calls == 0 and not hasattr(router, "appeared")


def test_library_modules_have_no_user_state(state):
    modules, _ = state
    assert not modules.user_state and not modules.user_state_pieces()


def test_torch_modules_keep_values_if_they_have_buffers(monkeypatch):
    router: Any = Router()
    router.norm, router.linear = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3)
    modules, _ = built(monkeypatch, router)
    assert list(modules.user_state) == [OPERATOR]
    modules.begin()
    router.norm(torch.randn(4, 3))
    modules.commit()
    others_router: Any = Router()
    others_router.norm = torch.nn.BatchNorm1d(3)
    others, _ = built(monkeypatch, others_router)
    others.user_state[OPERATOR].copy_(modules.user_state[OPERATOR])
    others.loaded(others.user_state[OPERATOR])
    for name, buffer in router.norm.named_buffers():
        assert torch.equal(others_router.norm.get_buffer(name), buffer), name


def test_values_of_user_module_are_loaded_by_another_process(monkeypatch, of_user):
    modules, router = of_user
    for _ in range(3):
        modules.begin()
        router.calls += 1
        router.mean.add_(1)
        router.appeared = {"tokens": router.calls}
        modules.commit()
    ((data, (piece,)),) = modules.user_state_pieces().items()
    assert piece.name == f"module_state.{OPERATOR}.6" and piece.view is data is modules.user_state[OPERATOR]
    assert operator_of(piece.name) == OPERATOR and is_module_state(piece.name)
    others, other = built(monkeypatch, UserRouter())
    others.user_state[OPERATOR].copy_(data)
    others.loaded(others.user_state[OPERATOR])
    assert (other.calls, other.mean.tolist(), other.appeared) == (3, [3, 3], {"tokens": 3})
    others.begin()
    others.commit()  # what was loaded is saved again, although nothing has changed here
    assert torch.equal(others.user_state[OPERATOR], data)


def test_values_larger_than_their_memory_are_refused(of_user):
    modules, router = of_user
    modules.begin()
    router.mean = torch.zeros(10_000)
    with pytest.raises(ModuleStateError):
        modules.commit()


def test_bytes_of_other_model_are_refused(monkeypatch, of_user):
    modules, router = of_user
    modules.begin()
    router.appeared = 1
    modules.commit()
    others, other = built(monkeypatch, UserRouter())
    del other.calls
    other.appeared = torch.nn.Linear(1, 1)
    others.user_state[OPERATOR].copy_(modules.user_state[OPERATOR])
    with pytest.raises(ModuleStateError):
        others.loaded(others.user_state[OPERATOR])


def test_fp8_scales_of_transformer_engine_are_restored(monkeypatch):
    history, scale = torch.zeros(4), torch.ones(2)
    buffers = SimpleNamespace(global_amax_history_buffer={"a": [history]}, global_scale_buffer={"a": [scale]})
    engine = SimpleNamespace(FP8GlobalStateManager=SimpleNamespace(quantization_state=buffers))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.quantization", engine)
    modules, _ = built(monkeypatch, Router())
    modules.begin()
    history.data.add_(1)  # no change of the version, as by a kernel
    scale.data.mul_(2)
    buffers.global_scale_buffer["b"] = [torch.ones(1)]
    modules.discard()
    assert history.tolist() == [0] * 4 and scale.tolist() == [1, 1] and "b" in buffers.global_scale_buffer


def test_paths_have_global_numbers():
    paths = [path for _, path in paths_of(model_of(Router()))]
    assert "decoder.layers.4.mlp.router" in paths and "decoder.layers.4.mlp.experts.experts.3" in paths


@each_row(
    "path, operator",
    {
        "decoder.layers.4.mlp.router": OPERATOR,
        "decoder.layers.4.mlp.experts.experts.3.linear_fc1": "layers.4.expert.3",
        "decoder.layers.4.self_attention.linear_proj": "layers.4.attention",
        "decoder.layers.4.input_layernorm": "layers.4.attention",
        "decoder.layers.4": "layers.4.mlp",
        "decoder.layers.4.adapter": "layers.4.mlp",
        "embedding.word_embeddings": "embedding",
        "output_layer": "output",
        "": "embedding",
    }.items(),
)
def test_each_module_belongs_to_an_operator(path, operator):
    assert operator_of_module(path) == operator
