"""Sizes of operators, counted by hand; those of real models are compared in ``test_operators.py``."""

from moc.state.operators import Operator
from tests.model_shape import ModelShape, model_operators

PLAIN = ModelShape((0, 1), 8, 16, 8, 4, 2, 100, num_experts=2, expert_ffn_hidden_size=5)


def test_operators_with_biases_match_manual_count():
    norm, attention = 16, 8 * (16 + 8) + 16  # qkv of 8 + 2 x 4 rows and the projection; the bias of qkv
    expert = 8 * 10 + 5
    assert model_operators(PLAIN) == [
        Operator("embedding", "embedding", None, None, 800, 0),
        Operator("layers.0.attention", "attention", 0, None, attention + norm + 8, norm + 8),
        Operator("layers.0.mlp", "mlp", 0, None, 8 * 32 + 16 + 8 + norm, 8 + norm),
        Operator("layers.1.attention", "attention", 1, None, attention + norm + 8, norm + 8),
        Operator("layers.1.mlp", "mlp", 1, None, norm, norm),  # the norm alone: no shared expert
        Operator("layers.1.router", "router", 1, None, 2 * 9, 2 * 9),
        Operator("layers.1.expert.0", "expert", 1, 0, expert + 8, 8),
        Operator("layers.1.expert.1", "expert", 1, 1, expert + 8, 8),
        Operator("output", "output", None, None, norm, norm),
    ]


def test_dense_model_has_no_experts():
    dense = ModelShape((0, 0), 8, 16, 8, 4, 2, 100)
    assert (dense.positions, dense.num_experts, dense.expert_ffn_hidden_size, dense.shared_ffn_hidden_size) == (0,) * 4
    kinds = [one.kind for one in model_operators(dense)]
    assert kinds == ["embedding", "attention", "mlp", "attention", "mlp", "output"]


def sizes(**settings):
    plain = dict(expert_layers=(1,), hidden_size=8, ffn_hidden_size=16, query_width=8, key_width=4, head_width=2)
    shape = ModelShape(**plain, vocab_size=100, num_experts=1, expert_ffn_hidden_size=5, **settings)
    return {one.name.removeprefix("layers.0."): (one.parameters, one.unsliced) for one in model_operators(shape)}


def test_operators_without_biases_match_manual_count():
    found = sizes(gated=True, linear_bias=False, norm_bias=False, qk_norm=True, tied=False, shared_ffn_hidden_size=3)
    assert found == {
        "embedding": (800, 0),
        "attention": (8 * 24 + 8 + 2 * 2, 8 + 2 * 2),
        "mlp": (8 * 9 + 8, 8),
        "router": (8, 8),
        "expert.0": (8 * 15, 0),
        "output": (8 + 800, 8),
    }


def test_additional_setting_adds_its_parameters():
    plain = sizes(linear_bias=False)
    assert sizes(linear_bias=False, positions=7)["embedding"] == (plain["embedding"][0] + 56, 56)
    assert sizes(linear_bias=False, qkv_bias=True)["attention"] == (plain["attention"][0] + 16, plain["attention"][1])
