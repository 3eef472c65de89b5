"""Every parameter belongs to one operator, and the operators' sizes follow from the shape of the model alone."""

from megatron.pretraining.process import cpu
from tests.cases import each_row
from tests.errors import raises

cpu.install()  # comes before megatron.core

from moc.state.operators import OPERATORS, operator_of  # noqa: E402


@each_row(
    "parameter, operator",
    [
        ("embedding.word_embeddings.weight", "embedding"),
        ("embedding.position_embeddings.weight", "embedding"),
        ("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight", "layers.3.attention"),
        ("decoder.layers.3.self_attention.linear_qkv.weight", "layers.3.attention"),
        ("decoder.layers.3.self_attention.q_layernorm.weight", "layers.3.attention"),
        ("decoder.layers.12.mlp.linear_fc1.layer_norm_weight", "layers.12.mlp"),
        ("decoder.layers.12.pre_mlp_layernorm.weight", "layers.12.mlp"),
        ("decoder.layers.3.mlp.linear_fc1.weight_w", "layers.3.mlp"),
        ("decoder.layers.3.mlp.shared_experts.linear_fc2.weight", "layers.3.mlp"),
        ("decoder.layers.3.mlp.shared_experts.gate_weight", "layers.3.mlp"),
        ("decoder.layers.3.mlp.router.weight", "layers.3.router"),
        ("decoder.layers.3.mlp.experts.experts.15.linear_fc1.weight_w", "layers.3.expert.15"),
        ("decoder.final_layernorm.weight", "output"),
        ("output_layer.weight", "output"),
    ],
)
def test_parameter_belongs_to_expected_operator(parameter, operator):
    assert operator_of(parameter) == operator


@each_row(
    "name",
    [
        "encoder.layers.3.self_attention.linear_qkv.weight",
        "decoder.layers.3.cross_attention.linear_q.weight",
        "decoder.layers.x.self_attention.linear_qkv.weight",
        "decoder.layers.3.mlp.experts.linear_fc1.weight",
        "module.output_layer.weight",
        "embedding",
        "",
    ],
)
def test_unknown_parameter_name_is_refused(name):
    with raises("parameter-unknown", name) as error:
        operator_of(name)
    assert all(known in str(error.value) for known in OPERATORS)
