"""Every parameter belongs to one operator, and the operators' sizes follow from the shape of the model alone."""

from collections import Counter

import pytest

from megatron.pretraining.process import cpu
from tests.errors import raises

cpu.install()  # comes before megatron.core
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from megatron.pretraining.config import Config, compose  # noqa: E402
from megatron.pretraining.model.build import build_gpt, transformer_config  # noqa: E402
from megatron.pretraining.model.parameters import unpartitioned_parameters  # noqa: E402
from megatron.pretraining.model.shape import model_shape  # noqa: E402
from moc.state.operators import OPERATORS, operator_of  # noqa: E402
from moc.state.shape import model_operators  # noqa: E402

RUN = dict(micro_batch_size=1, train_iters=1, lr=1e-3, mock_data=True, tokenizer_type="NullTokenizer", vocab_size=100)
TINY = dict(
    **RUN,
    num_layers=3,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    seq_length=16,
    num_experts=4,
    moe_ffn_hidden_size=24,
    moe_layer_freq=(0, 1, 1),
    moe_router_topk=2,
    transformer_impl="local",
)
SWIGLU = dict(swiglu=True, add_bias_linear=False, position_embedding_type="rope")
FULL_WIDTH = dict(group_query_attention=True, qk_layernorm=True, qk_layernorm_full_width=True)
MODELS = {
    "gelu with biases, tied": {},
    "untied": dict(untie_embeddings_and_output_weights=True),
    "swiglu, shared experts, rms": dict(SWIGLU, normalization="RMSNorm", moe_shared_expert_intermediate_size=40),
    "grouped queries": dict(SWIGLU, group_query_attention=True, num_query_groups=2, qk_layernorm=True),
    "normed over all heads": dict(SWIGLU, num_query_groups=2, **FULL_WIDTH),
    "gated shared experts": dict(SWIGLU, moe_shared_expert_intermediate_size=40, moe_shared_expert_gate=True),
    "bias of queries alone": dict(SWIGLU, add_qkv_bias=True, kv_channels=16),
    "dense": dict(num_experts=None, moe_layer_freq=1, moe_ffn_hidden_size=None, moe_router_topk=2),
}
VOCABULARY = 128


@pytest.mark.parametrize(
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
def test_operator_of_a_parameter(parameter, operator):
    assert operator_of(parameter) == operator


@pytest.mark.parametrize(
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
def test_an_unknown_name_is_an_error_that_names_it(name):
    with raises("parameter-unknown", name) as error:
        operator_of(name)
    assert all(known in str(error.value) for known in OPERATORS)


def operators(config: Config, vocabulary: int):
    return model_operators(model_shape(config.network, config.moe, vocabulary))


def test_facts_of_operators_follow_from_their_names():
    for o in operators(compose(TINY), VOCABULARY):
        expected = (
            [o.kind] if o.layer is None else ["layers", o.layer, o.kind, *([] if o.expert is None else [o.expert])]
        )
        assert o.name == ".".join(map(str, expected))
        assert (o.expert is not None) == (o.kind == "expert")


@pytest.fixture
def build():
    """Builds rank 0's part of a real model, as far as that works without other workers."""

    def build(config: Config, tensor_parallel_size: int):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tensor_parallel_size)
        parallel_state.initialize_model_parallel(tensor_parallel_size, create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        return build_gpt(config, transformer_config(config), VOCABULARY, None)

    yield build
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def held(model) -> Counter:
    """Elements that this rank holds, by operator."""
    count = Counter()
    for pieces in unpartitioned_parameters(model).values():
        for piece in pieces:
            count[operator_of(piece.name)] += piece.view.numel()
    return count


@pytest.mark.parametrize("name", MODELS)
def test_operators_are_those_of_the_real_model(build, name):
    config = compose(TINY | MODELS[name])
    assert held(build(config, 1)) == {o.name: o.parameters for o in operators(config, VOCABULARY)}


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("dense", "normed over all heads")])
def test_tensor_parallel_ranks_hold_their_slice_and_all_that_is_not_sliced(build, name):
    parallel = dict(tensor_model_parallel_size=2, sequence_parallel=True)
    with_biases = "swiglu" not in MODELS[name] and dict(num_experts=None, moe_layer_freq=1, moe_ffn_hidden_size=None)
    config = compose(TINY | MODELS[name] | parallel | (with_biases or {}))
    model = build(config, 2)
    expected = {o.name: (o.parameters - o.unsliced) // 2 + o.unsliced for o in operators(config, VOCABULARY)}
    assert held(model) == expected
