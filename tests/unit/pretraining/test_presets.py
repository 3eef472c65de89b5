"""The presets are the models that the papers describe."""

import pytest

from megatron.pretraining.entry.command_line import preset_options
from megatron.pretraining.planning.model import config_of, meta_operators
from megatron.pretraining.presets import PRESETS
from tests.cases import each_row


@each_row("name", PRESETS)
def test_preset_parameters_are_within_5_percent_of_paper(name):
    preset, config = PRESETS[name], config_of(name, [])
    operators = meta_operators(config, name)
    assert len({operator.name for operator in operators}) == len(operators)
    assert {layer for layer, _ in filter(None, (operator.expert_id for operator in operators))}
    total = sum(operator.parameters for operator in operators)
    top_k = config.moe.moe_router_topk
    idle = sum(o.parameters for o in operators if o.expert is not None and o.expert >= top_k)
    for counted, of_paper in ((total, preset.total_parameters), (total - idle, preset.active_parameters)):
        assert of_paper is None or counted == pytest.approx(of_paper, rel=0.05)


def test_presets_equal_tables_of_papers():
    table = {
        "gpt-125m-8e": (12, 8, 1, 6),
        "gpt-350m-16e": (24, 16, 1, 12),
        "gpt-moe-7b": (12, 32, 6, 12),
        "qwen-moe-14b": (24, 64, 8, 24),
        "deepseek-moe-16b": (28, 64, 8, 27),
    }
    for name, figures in table.items():
        values = PRESETS[name].values
        experts = sum(values.get("moe_layer_freq", [1] * values["num_layers"]))
        assert (values["num_layers"], values["num_experts"], values["moe_router_topk"], experts) == figures


def test_expert_pattern_follows_layer_count():
    assert preset_options("gpt-125m-8e", {"num_layers": 3})["moe_layer_freq"] == [0, 1, 0]
    assert preset_options("gpt-125m-8e", {"num_layers": 14})["moe_layer_freq"] == [0, 1] * 7
    assert preset_options("gpt-125m-8e", {"seq_length": 64})["max_position_embeddings"] == 64
