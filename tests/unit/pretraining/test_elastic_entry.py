"""Elastic training of the models of Megatron-LM's scripts: models that it cannot place."""

import types

import pytest
import torch

from megatron.pretraining.process import cpu

cpu.install()  # comes before megatron.core

from megatron.pretraining.config import ConfigError  # noqa: E402
from megatron.pretraining.entry import elastic  # noqa: E402
from tests.cases import each_row  # noqa: E402


@each_row("stage", [0, 1])
def test_model_with_layers_outside_plan_is_refused(stage, monkeypatch):
    monkeypatch.setattr(elastic.parallel_state, "get_pipeline_model_parallel_rank", lambda: stage)
    plans = {0: types.SimpleNamespace(tables={0: None})}
    config = types.SimpleNamespace(elastic=types.SimpleNamespace(elastic_dispatch="level"))
    if stage == 1:  # without experts in the plan and in the model
        elastic.fill_expert_slots(config, [torch.nn.Linear(1, 1)], plans)
        return
    with pytest.raises(ConfigError) as refused:
        elastic.fill_expert_slots(config, [torch.nn.Linear(1, 1)], plans)
    assert refused.value.code == "elastic-unsupported"
