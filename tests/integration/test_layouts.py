"""A model trains alike however it is laid out over workers."""

import pytest

from tests.integration.tiny import DEEP, EXPERT_BIAS, FOUR, LAYOUTS, known, train
from tests.shared import ALL

CLOSE = 1e-5


@pytest.fixture(scope="module")
def data(data):
    """Of the dataset, with batches that four workers can share."""
    return data | FOUR


def assert_alike(trained, reference, end=None):
    """The same up to an iteration, or to the end."""
    assert trained.losses == pytest.approx(reference.losses[:end], abs=CLOSE)
    assert trained.norms == pytest.approx(reference.norms[:end], abs=CLOSE)
    assert trained.samples == {i: seen for i, seen in reference.samples.items() if end is None or i < end}
    assert trained.weights  # and copies of weights agree


@pytest.mark.parametrize(
    ("layout", "end"),
    [("DP4", 8), ("PP2xEP2", 30), ("EP4", 8), ("TP2xEP2", 8), ("PP4", 8), ("interleaved", 8)],
)
def test_thirty_iterations_match_single_worker_in_every_layout(layout, end, data):
    """One layout goes through all of them, others through the beginning: that is where rates are highest."""
    thirty, end = data | dict(train_iters=30), 30 if ALL else end
    deep = {name: value for name, value in LAYOUTS[layout][1].items() if name == "num_layers"}
    alone = known("1", thirty | deep)
    assert len(alone.losses) == 30
    assert alone.losses[-1] < alone.losses[0] - 0.4
    assert_alike(train(layout, thirty | dict(exit_interval=end)), alone, end)


FULL_WIDTH = ["megatron.pretraining.model.full_width", "layer_spec"]


OPTIONS = {  # name: (layout, flags of both runs, flags of the run in that layout)
    "expert TP by allgather": (
        "TP2xEP2", {}, dict(expert_tensor_parallel_size=2, moe_token_dispatcher_type="allgather")
    ),
    "allgather": ("EP4", {}, dict(moe_token_dispatcher_type="allgather")),
    "replicated optimizer": ("PP2xEP2", {}, dict(use_distributed_optimizer=False)),
    "overlap": ("PP2xEP2", {}, dict(overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=20000)),
    "recompute all, learned positions": (
        "PP2",
        dict(position_embedding_type="learned_absolute"),
        dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    ),
    "recompute attention": ("TP2", {}, dict(recompute_granularity="selective")),
    "tied embeddings": ("PP2xEP2", dict(untie_embeddings_and_output_weights=False), {}),
    "tied embeddings, loss per token, interleaved": (
        "interleaved", DEEP | dict(untie_embeddings_and_output_weights=False, calculate_per_token_loss=True), {}
    ),
    "gated shared experts": (
        "TP2xEP2", dict(moe_shared_expert_intermediate_size=64, moe_shared_expert_gate=True), {}
    ),
    "overlapped shared experts, z-loss": (
        "EP2",
        dict(moe_shared_expert_intermediate_size=64, moe_shared_expert_gate=True, moe_z_loss_coeff=0.01),
        dict(moe_shared_expert_overlap=True),
    ),
    "GPT-2 like": (
        "TP2xEP2",
        dict(swiglu=False, add_bias_linear=True, position_embedding_type="learned_absolute", moe_layer_freq=2),
        {},
    ),
    "RMSNorm, grouped queries": (
        "TP2",
        dict(normalization="RMSNorm", qk_layernorm=True, group_query_attention=True, num_query_groups=2),
        {},
    ),
    "dense layers mixed in, heads normed together": (
        "PP2", DEEP | dict(moe_layer_freq=[0, 1, 1, 0], qk_layernorm=True, spec=FULL_WIDTH), {}
    ),
    "no experts": ("TP2", dict(num_experts=None, moe_aux_loss_coeff=0.0, moe_token_dispatcher_type="allgather"), {}),
    "dropped tokens": ("EP4", dict(moe_expert_capacity_factor=0.8), {}),
    "padded to capacity": (
        "PP2xEP2", dict(moe_expert_capacity_factor=0.8, moe_pad_expert_input_to_capacity=True), {}
    ),
    "expert bias, loss per token": ("PP2xEP2", EXPERT_BIAS | dict(calculate_per_token_loss=True), {}),
    "aux loss, loss per token": ("TP2", dict(calculate_per_token_loss=True, moe_aux_loss_coeff=0.1), {}),
    "aux loss, loss per token, experts": ("EP2", dict(calculate_per_token_loss=True, moe_aux_loss_coeff=0.1), {}),
    "z-loss, loss per token": (
        "TP2", dict(calculate_per_token_loss=True, moe_z_loss_coeff=0.1, moe_aux_loss_coeff=0.0), {}
    ),
    "aux loss per sequence": (
        "TP2", dict(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.1), {}
    ),
    "quantile balancing": (
        "PP2xEP2",
        dict(
            moe_router_load_balancing_type="quantile_balancing",
            moe_router_quantile_balancing_ema=0.5,
            moe_aux_loss_coeff=0.0,
        ),
        {},
    ),
    "SGD": ("PP2", dict(optimizer="sgd", lr=0.1, use_distributed_optimizer=False), {}),
    "attention within documents": (
        "PP2xEP2",
        dict(
            reset_attention_mask=True,
            reset_position_ids=True,
            eod_mask_loss=True,
            position_embedding_type="learned_absolute",
        ),
        {},
    ),
    "micro batches of two": ("DP2", dict(micro_batch_size=2), {}),
}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_option_trains_identically_in_every_layout(option, data):
    layout, model, parallel = OPTIONS[option]
    model = {**data, "train_iters": 3, **model}
    assert_alike(train(layout, model | parallel), known("1", model))
