"""Stock names by arithmetic are those that megatron-core gives the real model, of every kind that there is."""

import contextlib
import math
from types import SimpleNamespace

from megatron.pretraining.process import cpu
from tests.errors import raises

cpu.install()  # comes before megatron.core
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory  # noqa: E402
from torch.distributed import HashStore  # noqa: E402

from megatron.pretraining.convert.contents import Facts  # noqa: E402
from megatron.pretraining.convert.dense import write_dense  # noqa: E402
from megatron.pretraining.convert.hugging_face.megatron_logits import built  # noqa: E402
from megatron.pretraining.convert.torch_dist import (  # noqa: E402
    StockPosition,
    extra_states,
    stacks_layers,
    stock_positions,
    unpartitioned_positions,
)
from megatron.pretraining.entry.configuration import described as described_by_arguments  # noqa: E402
from megatron.pretraining.model.parameters import unpartitioned_buffers, unpartitioned_parameters  # noqa: E402
from moc.state.operators import Region  # noqa: E402
from tests.cases import each_row  # noqa: E402
from tests.configs import config_of  # noqa: E402

TINY = dict(micro_batch_size=1, train_iters=1, lr=1e-3, mock_data=True, tokenizer_type="NullTokenizer", vocab_size=100,
            num_layers=3, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, seq_length=16, num_experts=4,
            moe_ffn_hidden_size=24, moe_router_topk=2, transformer_impl="local")  # fmt: skip
SWIGLU = dict(swiglu=True, add_bias_linear=False, position_embedding_type="rope")
EXPERT_BIAS = dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
DENSE = dict(num_experts=None, moe_ffn_hidden_size=None, moe_router_topk=2)
MODELS = {
    "gelu with biases, tied": {},
    "untied": dict(untie_embeddings_and_output_weights=True),
    "some layers dense": dict(SWIGLU, moe_layer_freq=(0, 1, 1)),
    "every second layer": dict(moe_layer_freq=2, num_layers=4),
    "listed layers, all alike": dict(SWIGLU, moe_layer_freq=(1, 1, 1)),
    "swiglu, shared experts, rms": dict(SWIGLU, normalization="RMSNorm", moe_shared_expert_intermediate_size=40),
    "shared experts in some layers": dict(SWIGLU, moe_layer_freq=(0, 1, 1), moe_shared_expert_intermediate_size=40),
    "grouped queries, normed": dict(SWIGLU, group_query_attention=True, num_query_groups=2, qk_layernorm=True),
    "normed over all heads, gated shared experts": dict(
        SWIGLU,
        qk_layernorm=True,
        spec=["megatron.pretraining.model.full_width", "layer_spec"],
        moe_shared_expert_intermediate_size=40,
        moe_shared_expert_gate=True,
    ),
    "bias of queries alone": dict(SWIGLU, add_qkv_bias=True, kv_channels=16),
    "gate with biases": dict(swiglu=True),
    "balanced by biases": dict(SWIGLU, **EXPERT_BIAS),
    "dense": DENSE,
    "dense, gated": DENSE | SWIGLU,
}


@contextlib.contextmanager
def one_worker():
    """Is the only worker of a job; yields a function that builds a model."""

    def build(flags: dict):
        config = config_of(TINY | flags)
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        return built(config, 128), {"shape": {}, "model": described_by_arguments(config.arguments)}

    try:
        yield build
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def described(model) -> tuple[dict[tuple, tuple], set[str]]:
    """megatron-core's own description: the memory of every box by its place, and the keys of objects."""
    boxes, objects = {}, set()
    for entry in model.sharded_state_dict().values():
        for part in entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]:
            if isinstance(part, ShardedObject):
                objects.add(part.unique_key)
                continue
            assert isinstance(part, ShardedTensor)
            region = Region(tuple(part.global_offset), (1,) * part.prepend_axis_num + tuple(part.local_shape))
            boxes[StockPosition(part.key, tuple(part.global_shape), region, part.prepend_axis_num)] = memory(part.data)
    return boxes, objects


def unpartitioned(model) -> dict[str, tuple]:
    """The memory of every tensor by its name in the unpartitioned model."""
    pieces = (unpartitioned_parameters(model) | unpartitioned_buffers(model)).values()
    return {piece.name: memory(piece.view) for held in pieces for piece in held}


def memory(tensor) -> tuple:
    return tensor.data_ptr(), tuple(tensor.shape)


@each_row("name", MODELS)
def test_stock_names_equal_those_of_real_model(name):
    with one_worker() as build:
        model, shape = build(MODELS[name])
        boxes, objects = described(model)
        tensors = unpartitioned(model)
    places = stock_positions({name: shape for name, (_, shape) in tensors.items()}, stacks_layers(shape))
    assert {place: tensors[name] for name, place in places.items()} == boxes
    extra = [ShardedObject(key, None, whole, at).unique_key for key, whole, at in extra_states(places)]
    assert len(extra) == len(set(extra)) and set(extra) >= objects
    engines = {key for key in extra if "layernorm._extra_state" in key or "core_attention._extra_state" in key}
    assert set(extra) - objects == engines
    assert unpartitioned_positions({place.key: place.global_shape for place in boxes}) == places


WHOLE = {
    f"decoder.layers.{layer}.mlp.experts.experts.{expert}.linear_fc1.weight_{half}": (6, 4)
    for layer in range(2) for expert in range(3) for half in "wv"
}  # fmt: skip


@each_row("stacked", [True, False])
@each_row("name", WHOLE)
def test_missing_or_different_tensor_is_refused(name, stacked):
    filled = sum(place.region.numel for place in stock_positions(WHOLE, stacked).values())
    assert filled == sum(map(math.prod, WHOLE.values()))
    with raises("checkpoint-incomplete", "linear_fc1.weight"):
        stock_positions({n: shape for n, shape in WHOLE.items() if n != name}, stacked)
    with raises("checkpoint-incomplete"):
        stock_positions(WHOLE | {name: (5, 4)}, stacked)


@each_row("option", [dict(mtp_num_layers=1), dict(hybrid_layer_pattern="M*")])
def test_model_with_renamed_layers_is_refused(option, tmp_path):
    contents = SimpleNamespace(facts=Facts(1, "full", {}, {"model": option}, 1))
    with raises("target-unsupported", "--save"):
        write_dense(contents, tmp_path, 1, None, 1, int)
    assert not [*tmp_path.iterdir()]
