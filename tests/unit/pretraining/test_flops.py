"""The FLOP count, against counting by hand."""

import pytest

from megatron.pretraining.process import cpu

cpu.install()

from megatron.pretraining.logging.records import flops_per_sample  # noqa: E402
from tests.configs import config_of  # noqa: E402

SMALL = dict(
    num_layers=2, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2, seq_length=4, train_iters=1, lr=1e-3,
    micro_batch_size=1, mock_data=True, tokenizer_type="NullTokenizer", vocab_size=10,
)  # fmt: skip
ATTENTION = 4 * 8 * 8 + 8 * 4  # four projections; half of scores and of their product with values
OUTPUT = 8 * 128


def weights(**flags):
    """Multiply-adds of a token in the forward pass, as the module counts them."""
    return flops_per_sample(config_of(SMALL | flags), 128) / 6.0 / 4


def test_dense_model_flops_match_manual_count():
    assert weights() == 2 * (ATTENTION + 2 * 8 * 16) + OUTPUT
    assert weights(swiglu=True) == 2 * (ATTENTION + 3 * 8 * 16) + OUTPUT


def test_expert_flops_follow_router_topk():
    layer = ATTENTION + 2 * (2 * 8 * 16) + 8 * 4
    experts = dict(num_experts=4, moe_router_topk=2, add_bias_linear=False)
    assert weights(**experts) == 2 * layer + OUTPUT
    assert weights(**experts, moe_shared_expert_intermediate_size=32) == 2 * (layer + 2 * 8 * 32) + OUTPUT
    shared = dict(moe_shared_expert_intermediate_size=32, moe_shared_expert_gate=True)
    assert weights(**experts, **shared) == 2 * (layer + 2 * 8 * 32 + 8) + OUTPUT
    assert weights(**experts, moe_layer_freq=2) == layer + ATTENTION + 2 * 8 * 16 + OUTPUT


def test_grouped_queries_reduce_flops():
    less = weights() - weights(group_query_attention=True, num_query_groups=1)
    assert less == pytest.approx(2 * 2 * 8 * 4)
