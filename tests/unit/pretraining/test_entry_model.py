"""Operators, stages and names of any model, by its parameters."""

import pytest

from megatron.pretraining.process import cpu

cpu.install()

from megatron.pretraining.entry import cpu as entry_cpu  # noqa: E402

entry_cpu.install()

from megatron.pretraining.entry.model import ModelParameter, check_shape, operators_of_parameters, stages_of  # noqa: E402
from megatron.pretraining.model.parameters import known_name  # noqa: E402
from moc.state.operators import is_known  # noqa: E402
from moc.store.errors import CheckpointError  # noqa: E402
from tests.cases import each_row  # noqa: E402

ADAM, MUON = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)


def tensor(name, numel=8, stage=0, moments=ADAM, sliced=True):
    return ModelParameter(name, numel, sliced, stage, moments)


MODEL = [
    tensor("output_layer.weight", 64, stage=1),
    tensor("decoder.layers.1.mlp.experts.experts.1.linear_fc1.weight", stage=1),
    tensor("decoder.layers.1.mlp.router.weight", stage=1),
    tensor("decoder.layers.0.self_attention.linear_qkv.weight"),
    tensor("decoder.layers.0.input_layernorm.weight", 4, sliced=False),
    tensor("decoder.layers.1.mlp.experts.experts.0.linear_fc1.weight", stage=1),
    tensor("embedding.word_embeddings.weight", 64),
]


@each_row(
    ("name", "known"),
    [
        ("decoder.layers.1.mlp.router.weight", "decoder.layers.1.mlp.router.weight"),
        ("mtp.layers.0.transformer_layer.mlp.router.weight", "decoder.layers.4.mlp.router.weight"),
        ("mtp.layers.1.mtp_model_layer.mlp.linear_fc1.weight", "decoder.layers.5.mlp.linear_fc1.weight"),
        ("mtp.layers.0.enorm.weight", "decoder.layers.4.self_attention.mtp.enorm.weight"),
        ("decoder.layers.2.mixer.A_log", "decoder.layers.2.self_attention.mixer.A_log"),
        ("gate.strength", "output_layer.gate.strength"),
    ],
)
def test_any_parameter_maps_to_known_operator_name(name, known):
    assert known_name(name, 4) == known
    assert is_known(known)


def test_operators_follow_model_in_forward_order():
    operators = operators_of_parameters(MODEL)
    assert [operator.name for operator in operators] == [
        "embedding", "layers.0.attention", "layers.1.router", "layers.1.expert.0", "layers.1.expert.1", "output"
    ]  # fmt: skip
    attention, expert = operators[1], operators[4]
    assert (attention.parameters, attention.unsliced) == (12, 4)
    assert expert.expert_id == (1, 1)
    assert all(operator.moments is None for operator in operators)
    assert stages_of(MODEL) == (0, 1)


def test_operators_count_moments_of_their_own_optimizer():
    mixed = [
        tensor("output_layer.weight", 64),
        tensor("decoder.layers.0.self_attention.linear_qkv.weight", moments=MUON),
    ]
    attention, output = operators_of_parameters(mixed)
    assert attention.elements("momentum_buffer") == 8 and attention.elements("exp_avg") == 0
    assert output.elements("exp_avg") == 64 and output.elements("momentum_buffer") == 0
    assert attention.elements("master") == 8


def test_other_model_is_refused_by_operator_name():
    here = {operator.name: operator.parameters for operator in operators_of_parameters(MODEL)}
    check_shape(here, dict(here), "snapshot")
    with pytest.raises(CheckpointError, match="layers.1.router"):
        check_shape(here, here | {"layers.1.router": 7}, "snapshot")
