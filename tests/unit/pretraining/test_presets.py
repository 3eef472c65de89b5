"""The presets are the models that the papers describe."""

import pytest

from megatron.pretraining.config import compose
from megatron.pretraining.model.shape import count_parameters
from megatron.pretraining.presets import PRESETS

RUN = dict(micro_batch_size=1, train_iters=1, lr=1e-3, mock_data=True, tokenizer_type="NullTokenizer", vocab_size=100)


def shape(**values):
    config = compose({**RUN, "num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4, **values})
    return config.network, config.moe


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_model_that_works(name):
    config = compose({**RUN, **PRESETS[name].values}, name)
    assert config.model == name
    assert config.moe.num_experts


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.total_parameters])
def test_parameters_are_within_5_percent_of_the_paper(name):
    preset = PRESETS[name]
    config = compose({**RUN, **preset.values})
    total, active = count_parameters(config.network, config.moe, preset.vocab_size)
    assert total == pytest.approx(preset.total_parameters, rel=0.05)
    if preset.active_parameters:
        assert active == pytest.approx(preset.active_parameters, rel=0.05)


def test_papers_tables_are_met_exactly():
    table = {
        "gpt-125m-8e": (12, 8, 1),
        "gpt-350m-16e": (24, 16, 1),
        "gpt-moe-7b": (12, 32, 6),
        "qwen-moe-14b": (24, 64, 8),
        "deepseek-moe-16b": (28, 64, 8),
    }
    for name, (layers, experts, topk) in table.items():
        values = PRESETS[name].values
        assert (values["num_layers"], values["num_experts"], values["moe_router_topk"]) == (
            layers,
            experts,
            topk,
        )
    for name, layers_with_experts in (("gpt-125m-8e", 6), ("gpt-350m-16e", 12)):
        config = compose({**RUN, **PRESETS[name].values})
        assert sum(config.moe.expert_layers(config.network.num_layers)) == layers_with_experts


def test_dense_model_counted_by_hand():
    # embedding 10x8, positions 4x8, final norm 16; per layer: norms 32, qkv 8x24+24, projection 8x8+8,
    # feed-forward 8x32+32 and 32x8+8
    per_layer = 32 + (8 * 24 + 24) + (8 * 8 + 8) + (8 * 32 + 32) + (32 * 8 + 8)
    expected = 10 * 8 + 4 * 8 + 16 + 2 * per_layer
    assert count_parameters(*shape(), 10) == (expected, expected)


def test_experts_counted_by_hand():
    dense = 8 * 24 + 8 * 8 + 16  # attention without biases, two RMS norms
    expert = 3 * 8 * 16
    values = dict(
        num_experts=4,
        moe_ffn_hidden_size=16,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        moe_layer_freq="[0,1]",
        moe_shared_expert_intermediate_size=5,
        swiglu=True,
        ffn_hidden_size=20,
        add_bias_linear=False,
        normalization="RMSNorm",
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=True,
    )
    rest = 2 * 10 * 8 + 8 + 2 * dense + 3 * 8 * 20 + (4 * 8 + 3 * 8 * 5)
    assert count_parameters(*shape(**values), 10) == (rest + 4 * expert, rest + expert)


def test_router_and_every_expert_have_biases_where_the_rest_has():
    with_biases, active = count_parameters(*shape(num_experts=4), 10)
    without, active_without = count_parameters(*shape(num_experts=4, add_bias_linear=False), 10)
    attention, expert, router = 24 + 8, 32 + 8, 4
    assert with_biases - without == 2 * (attention + 4 * expert + router)
    assert active - active_without == 2 * (attention + 2 * expert + router)


def test_grouped_queries_need_fewer_weights():
    all_heads, _ = count_parameters(*shape(add_bias_linear=False), 10)
    one_group, _ = count_parameters(*shape(add_bias_linear=False, group_query_attention=True), 10)
    assert all_heads - one_group == 2 * (2 * 8 * 4)
