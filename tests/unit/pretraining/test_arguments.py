"""Flags: how they are spelled, and what follows from them."""

import ast
import shlex
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.pretraining.arguments import build_parser
from megatron.pretraining.config import (
    derive,
    together,
)
from megatron.pretraining.config.composed import all_flags, group_classes
from megatron.pretraining.config.flag import flags_of
from megatron.pretraining.config.layer_pattern import from_interval, parse_layer_freq
from tests.unit.pretraining.flags import BASE, DENSE, parse


def test_defaults_are_megatrons():
    config = parse()
    assert config.regularization.weight_decay == 0.01
    assert config.regularization.hidden_dropout == 0.1
    assert config.mixed_precision.initial_loss_scale == 2**32
    assert config.moe.moe_router_topk == 2
    assert config.moe.moe_token_dispatcher_type == "allgather"
    assert config.learning_rate.lr_decay_style == "linear"
    assert config.network.position_embedding_type == "learned_absolute"
    assert config.logging.log_interval == 100
    assert config.rng.seed == 1234


@pytest.mark.parametrize(
    "flags, group, field, value",
    [
        ("--swiglu", "network", "swiglu", True),
        ("--disable-bias-linear", "network", "add_bias_linear", False),
        ("--no-rope-fusion", "fusion", "apply_rope_fusion", False),
        ("--no-load-optim", "checkpoint", "load_optim", False),
        ("--no-save-rng", "checkpoint", "save_rng", False),
        ("--no-mmap-bin-files", "data", "mmap_bin_files", False),
        ("--no-check-for-nan-in-loss-and-grad", "training", "check_for_nan_in_loss_and_grad", False),
        ("--use-mcore-models", "compatibility", "use_mcore_models", True),
        ("--moe-aux-loss-coeff 1e-2", "moe", "moe_aux_loss_coeff", 0.01),
        ("--override-opt_param-scheduler", "learning_rate", "override_opt_param_scheduler", True),
        ("--exit-signal SIGUSR1", "training", "exit_signal", "SIGUSR1"),
        # Megatron-DeepSpeed's spellings
        ("--moe-expert-parallel-size 4", "parallel", "expert_model_parallel_size", 4),
        ("--topk 3", "moe", "moe_router_topk", 3),
        ("--moe-loss-coeff 0.1", "moe", "moe_aux_loss_coeff", 0.1),
        ("--expert-interval 2", "moe", "moe_layer_freq", (0, 1, 0, 1)),
    ],
)
def test_spelling(flags, group, field, value):
    assert getattr(getattr(parse(flags), group), field) == value


def test_every_switch_can_be_turned_back_and_the_last_word_counts():
    assert parse("--swiglu --no-swiglu").network.swiglu is False
    assert parse("--disable-bias-linear --add-bias-linear").network.add_bias_linear is True


def test_no_two_flags_share_a_name_or_spelling():
    names = [flag.name for group in group_classes().values() for flag in flags_of(group)]
    spellings = [s for flag in all_flags().values() for s in (*flag.on, *flag.off)]
    assert len(names) == len(set(names)) and len(spellings) == len(set(spellings))


def test_every_flag_has_its_help_under_its_group():
    text = " ".join(build_parser().format_help().split())
    for group in group_classes().values():
        assert group.__doc__.partition(":")[0].rstrip(".") in text
        for flag in flags_of(group):
            assert flag.help.endswith(".") or ";" in flag.help or "." in flag.help
            assert flag.on[0] in text


def test_help_and_print_config_need_neither_torch_nor_megatron_core():
    program = (
        "import sys; from megatron.pretraining.arguments import parse_config\n"
        "try: parse_config(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'megatron.core'} & set(sys.modules)), file=sys.stderr)"
    )
    for flags in (["--help"], [*shlex.split(BASE), "--print-config"]):
        done = subprocess.run([sys.executable, "-c", program, *flags], capture_output=True, text=True, check=True)
        assert ast.literal_eval(done.stderr.strip()) == [] and done.stdout


def test_sizes_follow_megatrons_rules():
    assert parse().network.ffn_hidden_size == 512
    assert parse("--swiglu").network.ffn_hidden_size == 320
    assert parse("--swiglu").moe.moe_ffn_hidden_size == 320
    config = parse("--moe-ffn-hidden-size 48")
    assert (config.network.kv_channels, config.network.max_position_embeddings) == (32, 64)
    assert (config.moe.moe_ffn_hidden_size, config.network.ffn_hidden_size) == (48, 512)


def test_query_groups():
    assert parse().network.num_query_groups == 4
    assert parse("--group-query-attention").network.num_query_groups == 1
    assert parse("--group-query-attention --num-query-groups 2").network.num_query_groups == 2


def test_sequence_parallel_is_off_without_tensor_parallelism():
    assert not parse("--sequence-parallel").parallel.sequence_parallel
    config = parse("--sequence-parallel --tensor-model-parallel-size 2 --disable-bias-linear")
    assert config.parallel.sequence_parallel


def test_expert_tensor_parallel_size_follows_the_rest():
    config = parse("--sequence-parallel --tensor-model-parallel-size 2 --disable-bias-linear")
    assert config.parallel.expert_tensor_parallel_size == 2


def test_precision():
    assert parse("--bf16").mixed_precision.accumulate_allreduce_grads_in_fp32
    assert not parse().mixed_precision.accumulate_allreduce_grads_in_fp32
    assert not parse("--fp16").training.check_for_nan_in_loss_and_grad
    assert parse("--fp16 --loss-scale 1024").training.check_for_nan_in_loss_and_grad
    assert parse("--apply-query-key-layer-scaling").mixed_precision.attention_softmax_in_fp32


def test_recompute_activations_means_selective():
    assert parse("--recompute-activations").training.recompute_granularity == "selective"


def test_fused_gelu_is_for_dense_models_with_biases():
    assert parse(base=DENSE).fusion.bias_gelu_fusion
    assert not parse().fusion.bias_gelu_fusion
    assert not parse("--disable-bias-linear", DENSE).fusion.bias_gelu_fusion


def test_interleaved_schedule():
    assert parse().virtual_pipeline_model_parallel_size is None
    assert not parse("--pipeline-model-parallel-size 2").parallel.overlap_p2p_comm
    for flag in ("--num-layers-per-virtual-pipeline-stage 1", "--num-virtual-stages-per-pipeline-rank 2"):
        config = parse(f"--pipeline-model-parallel-size 2 {flag}")
        assert config.virtual_pipeline_model_parallel_size == 2
        assert config.parallel.overlap_p2p_comm
    one = parse("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2")
    assert one.virtual_pipeline_model_parallel_size is None


def test_without_overlap_three_stages_may_interleave():
    flags = "--num-layers 6 --pipeline-model-parallel-size 3 --num-virtual-stages-per-pipeline-rank 2"
    assert not parse(f"{flags} --no-overlap-p2p-communication").parallel.overlap_p2p_comm


def test_transformer_engine_is_taken_where_it_is_installed(monkeypatch):
    assert parse("--transformer-impl local").network.transformer_impl == "local"
    for module in (derive, together):
        monkeypatch.setattr(module, "installed", lambda package: package == "transformer_engine")
    assert parse().network.transformer_impl == "transformer_engine"
    eight = parse("--bf16 --fp8-format hybrid")
    assert (eight.mixed_precision.fp8_format, eight.mixed_precision.fp8_recipe) == ("hybrid", "tensorwise")


def test_constant_weight_decay_stands_at_both_ends():
    regularization = parse("--weight-decay 0.1").regularization
    assert (regularization.start_weight_decay, regularization.end_weight_decay) == (0.1, 0.1)


def test_negative_capacity_drops_nothing():
    assert parse("--moe-expert-capacity-factor -1").moe.moe_expert_capacity_factor is None


def test_split_has_megatrons_default():
    assert parse().data.split == "969, 30, 1"


@pytest.mark.parametrize(
    "text, result",
    [
        ("2", 2),
        ("[0,1]*2", (0, 1, 0, 1)),
        ("([0]*3+[1]*1)*1", (0, 0, 0, 1)),
        ("([0]+[1]*3)", (0, 1, 1, 1)),
        ("2*[1, 0]", (1, 0, 1, 0)),
    ],
)
def test_layer_patterns(text, result):
    assert parse_layer_freq(text) == result
    assert parse(f"--moe-layer-freq '{text}'").moe.moe_layer_freq == result


@pytest.mark.parametrize(
    "text", ["0", "-1", "[2]", "[]", "[0", "[0]*x", "__import__('os')[0]", "[0]*9999*9999", "[0]+1", "[0.0]"]
)
def test_layer_patterns_that_are_none(text):
    with pytest.raises(ValueError):
        parse_layer_freq(text)


def test_the_first_of_n_layers_is_megatrons_and_the_last_is_deepspeeds():
    assert parse("--moe-layer-freq 2").moe.expert_layers(4) == (1, 0, 1, 0)
    assert parse("--expert-interval 2").moe.expert_layers(4) == (0, 1, 0, 1)
    assert parse(base=DENSE).moe.expert_layers(3) == (0, 0, 0)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 40))
def test_expert_interval_counts_like_megatron_deepspeed(interval, layers):
    assert from_interval(interval, layers) == tuple(int((i + 1) % interval == 0) for i in range(layers))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=20), st.integers(1, 5))
def test_patterns_evaluate_like_python(items, times):
    text = f"({items}+[1])*{times}"
    assert parse_layer_freq(text) == tuple(eval(text))
