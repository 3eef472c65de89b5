"""Flags: how they are spelled, what follows from them, and which are refused with which sentence."""

import ast
import json
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.training import first_worker
from megatron.training.arguments import build_parser, parse_config, read_config_file
from megatron.training.config import (
    ConfigError,
    check_backend,
    check_world,
    compose,
    data_parallel_size,
    derive,
    global_batch_size,
    num_microbatches,
    split_blend,
    together,
    train_iterations,
)
from megatron.training.config.composed import all_flags, group_classes
from megatron.training.config.flag import flags_of
from megatron.training.config.layer_pattern import from_interval, parse_layer_freq

DENSE = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 "
    "--train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)
BASE = DENSE + " --num-experts 8"


def parse(flags="", base=BASE):
    return parse_config(shlex.split(f"{base} {flags}"))


def refusal(capsys, flags, base=BASE):
    """The sentence that ends the process, which exits with code 2."""
    with pytest.raises(SystemExit) as exit:
        parse(flags, base)
    assert exit.value.code == 2
    message = capsys.readouterr().err.split("error: ", 1)[1].strip()
    assert "\n" not in message
    return message


def without(flag, base=BASE):
    """The base flags less one, with its value."""
    return re.sub(rf"{flag}( (?!--)\S+)?( |$)", "", base)


@pytest.fixture
def dataset(tmp_path):
    """Prefix of a dataset, empty, whose files exist."""
    for ending in (".bin", ".idx"):
        (tmp_path / f"corpus{ending}").touch()
    return str(tmp_path / "corpus")


# --- spellings


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
        "import sys; from megatron.training.arguments import parse_config\n"
        "try: parse_config(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'megatron.core'} & set(sys.modules)), file=sys.stderr)"
    )
    for flags in (["--help"], [*shlex.split(BASE), "--print-config"]):
        done = subprocess.run([sys.executable, "-c", program, *flags], capture_output=True, text=True, check=True)
        assert ast.literal_eval(done.stderr.strip()) == [] and done.stdout


# --- derived values


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
    assert not parse("--sequence-parallel").sequence_parallel
    config = parse("--sequence-parallel --tensor-model-parallel-size 2 --disable-bias-linear")
    assert config.sequence_parallel


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
    assert parse("--transformer-impl local").transformer_impl == "local"
    for module in (derive, together):
        monkeypatch.setattr(module, "installed", lambda package: package == "transformer_engine")
    assert parse().transformer_impl == "transformer_engine"
    eight = parse("--bf16 --fp8-format hybrid")
    assert (eight.mixed_precision.fp8_format, eight.mixed_precision.fp8_recipe) == ("hybrid", "tensorwise")


def test_constant_weight_decay_stands_at_both_ends():
    regularization = parse("--weight-decay 0.1").regularization
    assert (regularization.start_weight_decay, regularization.end_weight_decay) == (0.1, 0.1)


def test_negative_capacity_drops_nothing():
    assert parse("--moe-expert-capacity-factor -1").moe.moe_expert_capacity_factor is None


def test_split_has_megatrons_default():
    assert parse().data.split == "969, 30, 1"


# --- which layers hold experts


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


# --- refusals

TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
PP2 = "--pipeline-model-parallel-size 2"
SHARED = "--moe-shared-expert-intermediate-size 64 --disable-bias-linear"

REFUSED = [
    (
        "--reset-attention-mask --pipeline-model-parallel-size 4 --num-layers 4 --transformer-impl local",
        "--reset-attention-mask reaches only the first and the last",
    ),
    # experts
    ("--num-experts 6 --expert-model-parallel-size 4", "--num-experts 6 .* --expert-model-parallel-size 4"),
    ("--tensor-model-parallel-size 2", "--sequence-parallel: add it"),
    ("--tensor-model-parallel-size 2 --sequence-parallel", "--disable-bias-linear or --expert-tensor-paral"),
    ("--topk 9", "--moe-router-topk 9 is more than --num-experts 8"),
    ("--topk 1", "--moe-router-pre-softmax: add it"),
    ("--moe-router-enable-expert-bias", "--moe-router-score-function sigmoid: add it"),
    ("--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 1", "drop --moe-aux-loss-coeff"),
    (
        "--moe-expert-capacity-factor 1 --moe-router-load-balancing-type sinkhorn",
        "--moe-expert-capacity-factor works with",
    ),
    ("--moe-pad-expert-input-to-capacity", "a positive --moe-expert-capacity-factor: add it"),
    ("--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor -1", "--moe-expert-capacity-factor"),
    ("--moe-shared-expert-overlap", "--moe-shared-expert-intermediate-size: add it"),
    (f"--moe-shared-expert-overlap {SHARED}", "--moe-token-dispatcher-type alltoall"),
    ("--moe-shared-expert-intermediate-size 64", "--disable-bias-linear: add it"),
    ("--moe-router-num-groups 2", "give both or neither"),
    ("--moe-router-num-groups 3 --moe-router-group-topk 1", "not a multiple of --moe-router-num-groups 3"),
    ("--moe-router-num-groups 2 --moe-router-group-topk 3", "--moe-router-group-topk 3 is more than"),
    ("--moe-router-num-groups 8 --moe-router-group-topk 1", "--moe-router-topk 2 experts cannot come from"),
    ("--moe-layer-freq [0,1]", "lists 2 layers and --num-layers is 4"),
    ("--moe-layer-freq [0]*4", "no layer holds experts"),
    ("--expert-interval 5", "no layer holds experts"),
    ("--expert-interval 2 --moe-layer-freq 2", "exclude each other"),
    ("--moe-layer-freq x", "--moe-layer-freq is not understood"),
    (
        f"{TP2} --moe-ffn-hidden-size 3 --disable-bias-linear --expert-tensor-parallel-size 2",
        "--moe-ffn-hidden",
    ),
    # network
    ("--num-attention-heads 3", "--hidden-size 128 is not a multiple of --num-attention-heads 3"),
    ("--num-query-groups 2", "--group-query-attention: add it"),
    ("--group-query-attention --num-query-groups 3", "not a multiple of --num-query-groups 3"),
    ("--swiglu --squared-relu", "exclude each other"),
    ("--max-position-embeddings 32", "--max-position-embeddings 32 is less than --seq-length 64"),
    # parallelism
    (
        "--tensor-model-parallel-size 8 --sequence-parallel",
        "--num-attention-heads 4 .* --tensor-model-parallel",
    ),
    (
        f"{TP2} --group-query-attention",
        "--num-query-groups 1 is not a multiple of --tensor-model-parallel-size",
    ),
    (f"{TP2} --seq-length 63", "--seq-length 63 is not a multiple of --tensor-model-parallel-size 2"),
    (
        "--pipeline-model-parallel-size 3",
        "--num-layers 4 is not a multiple of --pipeline-model-parallel-size 3",
    ),
    ("--num-layers-per-virtual-pipeline-stage 1", "--pipeline-model-parallel-size greater than 1"),
    ("--num-virtual-stages-per-pipeline-rank 2", "--pipeline-model-parallel-size greater than 1"),
    (
        f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 1",
        "say the same thing",
    ),
    (f"{PP2} --num-layers 6 --num-layers-per-virtual-pipeline-stage 2", "3 layers of a pipeline stage"),
    (f"{PP2} --num-layers 6 --num-virtual-stages-per-pipeline-rank 2", "3 layers of a pipeline stage"),
    (
        f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
        "needs --overlap-p2p-communication: add it",
    ),
    ("--context-parallel-size 2", "is not supported: leave it at 1"),
    ("--overlap-param-gather --overlap-grad-reduce", "--use-distributed-optimizer: add it"),
    ("--overlap-param-gather --use-distributed-optimizer", "--overlap-grad-reduce: add it"),
    # training
    ("--train-samples 5", "--train-iters and --train-samples exclude each other"),
    ("--global-batch-size 3", "--global-batch-size 3 is not a multiple of --micro-batch-size 2"),
    ("--manual-gc-interval 2", "--manual-gc: add it"),
    ("--recompute-granularity full", "needs --recompute-method and --recompute-num-layers"),
    ("--recompute-method uniform", "belong to --recompute-granularity full"),
    ("--recompute-activations --recompute-granularity full", "drop one of them"),
    ("--micro-batch-size 0", "--micro-batch-size must be at least 1, not 0"),
    ("--micro-batch-size two", "--micro-batch-size takes a whole number; change 'two'"),
    ("--exit-signal SIGKILL", "--exit-signal is one of SIGTERM, SIGUSR1"),
    # learning rate
    ("--lr nan", "--lr must be a number"),
    ("--lr 0", "--lr must be greater than 0"),
    ("--min-lr 1", "--min-lr 1.0 is more than --lr 0.001"),
    ("--lr-warmup-init 1", "--lr-warmup-init 1.0 is more than --lr 0.001"),
    ("--lr-warmup-iters 10", "--lr-warmup-iters 10 is not less than --train-iters 10"),
    ("--lr-warmup-iters 5 --lr-decay-iters 5", "--lr-warmup-iters 5 is not less than --lr-decay-iters 5"),
    ("--lr-warmup-fraction 0.1 --lr-warmup-iters 1", "keep one"),
    ("--lr-warmup-fraction 1", "--lr-warmup-fraction must be less than 1"),
    ("--lr-decay-style WSD", "--lr-wsd-decay-iters: add it"),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 11", "--lr-wsd-decay-iters 11 is more than --train-iters 10"),
    ("--lr-decay-samples 9", "--lr-decay-samples does not fit --train-iters: give --lr-decay-iters"),
    ("--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler", "exclude each other"),
    # regularization and precision
    ("--start-weight-decay 0.5", "--weight-decay-incr-style linear or cosine: add it"),
    ("--weight-decay-incr-style linear", "needs --start-weight-decay and --end-weight-decay"),
    (
        "--weight-decay-incr-style linear --start-weight-decay 2 --end-weight-decay 1",
        "--start-weight-decay 2.0 is more",
    ),
    ("--hidden-dropout 1", "--hidden-dropout must be less than 1"),
    ("--fp16 --bf16", "--fp16 and --bf16 exclude each other"),
    ("--fp8-format hybrid", "needs weights in 16 bits: add --bf16 or --fp16"),
    ("--fp8-format hybrid --bf16 --fp8-recipe delayed", "choose tensorwise, blockwise or mxfp8"),
    ("--fp8-format e4m3 --bf16 --transformer-impl local", "--fp8-format e4m3 needs Transformer Engine"),
    ("--fp32-residual-connection", "without --fp16 or --bf16"),
    ("--initial-loss-scale 0.5", "--min-loss-scale 1.0 is more than --initial-loss-scale 0.5"),
    # data and tokenizer
    (
        "--data-path /nowhere/corpus",
        "--data-path and --mock-data exclude|--mock-data and --data-path exclude",
    ),
    ("--split 9,x", "--split '9,x' is not understood"),
    ("--split 0,0", "--split '0,0' is not understood"),
    ("--tokenizer-type SentencePieceTokenizer", "needs --tokenizer-model: add it"),
    ("--tokenizer-type HuggingFaceTokenizer", "needs --tokenizer-model: add it"),
    ("--tokenizer-type SentencePieceTokenizer --tokenizer-model /no/model", "/no/model does not exist"),
    ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model /no/model", "/no/model does not exist"),
    ("--tokenizer-type GPT2", "--tokenizer-type is one of SentencePieceTokenizer"),
    # checkpoints, evaluation, logging
    ("--async-save", "--async-save needs --save: add it"),
    ("--save-interval 5", "--save-interval needs --save: add it"),
    ("--save x --save-retain-interval 5", "--save-retain-interval needs --save-interval"),
    ("--save x --save-interval 2 --save-retain-interval 5", "5 is not a multiple of --save-interval 2"),
    ("--ckpt-step 5", "--ckpt-step needs --load or --ckpt-policy"),
    ("--finetune", "--finetune needs --load: add it"),
    ("--exit-on-missing-checkpoint", "--exit-on-missing-checkpoint needs --load"),
    ("--ckpt-format torch", "--ckpt-format is one of torch_dist"),
    # snapshots
    ("--ckpt-policy full", "--ckpt-policy needs a directory for snapshots: add --ckpt-dir or --save"),
    ("--ckpt-policy some --save x", "--ckpt-policy is one of .*full.*, not some"),
    ("--ckpt-dir x", "--ckpt-dir needs --ckpt-policy: add it"),
    ("--ckpt-blocking", "--ckpt-blocking needs --ckpt-policy: add it"),
    ("--ckpt-tier memory", "--ckpt-tier needs --ckpt-policy: add it"),
    ("--snapshot-interval 5", "--snapshot-interval needs --ckpt-policy: add it"),
    ("--pec-k 2", "--pec-k needs --ckpt-policy: add it"),
    ("--ckpt-policy full --save x --pec-k 2", "--pec-k needs --ckpt-policy pec, not full"),
    ("--ckpt-policy pec --save x --pec-k 2 --pec-k-persist 3", "--pec-k-persist 3 is more than the 2 experts"),
    ("--ckpt-policy pec --save x --pec-plt-limit 0.1", "--pec-plt-limit needs --pec-dynamic-k or --pec-k auto"),
    ("--ckpt-policy pec --save x --pec-k 0", "take auto or a number of at least 1, not 0"),
    ("--ckpt-policy pec --save x --pec-k auto --pec-k-persist 1", "--pec-k auto chooses how many experts go where"),
    ("--ckpt-policy full --save x --sparse-window 2", "--sparse-window needs --ckpt-policy sparse, not full"),
    ("--ckpt-policy sparse --save x --sparse-window 0", "take auto or a number of at least 1, not 0"),
    ("--ckpt-policy sparse --save x --snapshot-interval 5", "takes a snapshot in every iteration, not in every 5th"),
    ("--upstream-logging", "--upstream-logging needs --ckpt-policy: add it"),
    ("--ckpt-policy full --save x --upstream-logging", "--upstream-logging needs --ckpt-policy sparse, not full"),
    ("--ckpt-policy sparse --save x --upstream-log-limit 2", "--upstream-log-limit needs --upstream-logging"),
    (
        "--ckpt-policy sparse --save x --upstream-logging --untie-embeddings-and-output-weights",
        "--upstream-logging needs --pipeline-model-parallel-size greater than 1",
    ),
    (
        "--ckpt-policy sparse --save x --upstream-logging --pipeline-model-parallel-size 2",
        "tied across stages do not allow: add --untie-embeddings-and-output-weights",
    ),
    ("--ckpt-policy full --save x --mtbf-hours 2", "--mtbf-hours needs --pec-k auto"),
    ("--ckpt-policy full --save x --exact-only", "--exact-only is for --ckpt-policy auto, not full"),
    ("--ckpt-policy pec --save x --host-memory-gb 8", "--host-memory-gb is for --ckpt-policy auto, not pec"),
    ("--ckpt-policy auto --save x --host-memory-gb 0", "--host-memory-gb must be greater than 0"),
    ("--ckpt-policy auto --save x --snapshot-interval 5", "auto chooses --snapshot-interval by itself"),
    ("--ckpt-policy auto --save x --pec-k 2", "auto chooses --pec-k by itself, beside training: drop it"),
    ("--ckpt-policy auto --save x --sparse-window 2", "auto chooses --sparse-window by itself"),
    ("--ckpt-policy auto --save x --ckpt-blocking", "auto chooses --ckpt-blocking by itself"),
    ("--ckpt-policy auto --save x --upstream-logging", "--upstream-logging needs --ckpt-policy sparse, not auto"),
    ("--ckpt-policy full --save x --node-of-rank 0,1", "--node-of-rank needs --ckpt-tier memory"),
    ("--ckpt-policy full --save x --ckpt-tier memory --node-of-rank 0,../1", "called by letters and digits"),
    ("--ckpt-policy full --save x --ckpt-tier ram", "--ckpt-tier is one of disk, memory"),
    ("--ckpt-policy full --save x --ckpt-keep 0", "--ckpt-keep must be at least 1, not 0"),
    ("--ckpt-policy full --save x --ckpt-sharding all", "no sharding scheme 'all': choose one of"),
    ("--ckpt-policy full --save x --ckpt-overhead-budget 0", "--ckpt-overhead-budget must be greater than 0"),
    ("--ckpt-policy full --save x --ckpt-overhead-budget 1", "--ckpt-overhead-budget must be less than 1"),
    ("--ckpt-policy full --save x --snapshot-interval 0", "every 0 iterations is not possible: take 1 or more"),
    ("--ckpt-policy full --save x --snapshot-interval often", "auto or a number of iterations, not often"),
    ("--ckpt-policy full --save x --persist-interval 4", "--persist-interval needs --ckpt-tier memory"),
    ("--ckpt-policy full --save x --ckpt-tier memory --persist-interval 0", "--persist-interval must be at least 1"),
    (
        "--ckpt-policy full --save x --ckpt-tier memory --snapshot-interval 3 --persist-interval 4",
        "--persist-interval 4 is not a multiple of --snapshot-interval 3: change one of them",
    ),
    ("--eval-interval 0", "--eval-interval must be at least 1, not 0"),
    ("--eval-interval -3", "--eval-interval must be at least 1, not -3"),
    ("--log-timers-to-tensorboard", "--tensorboard-dir: add it"),
    # the command line itself
    ("--hiden-size 64", "--hiden-size is not a flag: did you mean --hidden-size"),
    ("--micro 3", "--micro is not a flag"),
    ("word", "word is not a flag"),
    ("--config /no/file.yaml", "--config /no/file.yaml cannot be read"),
]


@pytest.mark.parametrize("flags, sentence", REFUSED, ids=[flags[:70] for flags, _ in REFUSED])
def test_refused_with_a_sentence(capsys, flags, sentence):
    message = refusal(capsys, flags)
    assert re.search(sentence, message), message
    assert message.endswith((".", "?"))


@pytest.mark.parametrize(
    "missing, sentence",
    [
        ("--num-layers", "--num-layers is missing: .* --model preset"),
        ("--hidden-size", "--hidden-size is missing"),
        ("--num-attention-heads", "--num-attention-heads is missing"),
        ("--seq-length", "--seq-length is missing"),
        ("--micro-batch-size", "--micro-batch-size is missing"),
        ("--train-iters", "give --train-iters or --train-samples"),
        ("--lr", "--lr is missing: give it, on the command line or in the --config file"),
        ("--mock-data", "give --data-path, --train-data-path or --mock-data"),
        ("--tokenizer-type", "--tokenizer-type is missing"),
        ("--vocab-size", "NullTokenizer needs --vocab-size: add it"),
    ],
)
def test_missing_flags_are_named(capsys, missing, sentence):
    assert re.search(sentence, refusal(capsys, "", without(missing)))


@pytest.mark.parametrize("flag", ["--moe-router-topk 4", "--moe-grouped-gemm", "--moe-aux-loss-coeff 1", "--topk 1"])
def test_flags_of_experts_need_experts(capsys, flag):
    assert "without --num-experts" in refusal(capsys, flag, DENSE)


def test_expert_parallelism_needs_experts(capsys):
    message = refusal(capsys, "--expert-model-parallel-size 2", DENSE)
    assert message == "--expert-model-parallel-size has no effect without --num-experts: add it."


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("--moe-grouped-gemm", "needs Transformer Engine or grouped_gemm, and neither is installed"),
        ("--moe-permute-fusion", "needs Transformer Engine, which is not installed"),
        ("--transformer-impl transformer_engine", "Transformer Engine, which is not installed"),
        ("--moe-token-dispatcher-type flex", "deep_ep, which is not installed"),
    ],
)
def test_kernels_that_are_not_installed(capsys, monkeypatch, flags, sentence):
    monkeypatch.setattr(together, "installed", lambda package: False)
    assert sentence in refusal(capsys, f"{flags} --transformer-impl local" if "impl" not in flags else flags)


def test_grouped_gemm_and_biases(capsys, monkeypatch):
    for module in (derive, together):
        monkeypatch.setattr(module, "installed", lambda package: package == "transformer_engine")
    assert "--no-bias-dropout-fusion" in refusal(capsys, "--moe-grouped-gemm")
    assert parse("--moe-grouped-gemm --no-bias-dropout-fusion").moe.moe_grouped_gemm
    assert parse("--moe-grouped-gemm --disable-bias-linear").moe.moe_grouped_gemm


def test_split_is_not_for_separate_datasets(capsys, dataset):
    base = without("--mock-data")
    assert "--split divides --data-path" in refusal(capsys, f"--train-data-path {dataset} --split 9,1,0", base)
    assert "comes without --train-data-path" in refusal(capsys, f"--valid-data-path {dataset}", base)
    assert "exclude" in refusal(capsys, f"--data-path {dataset} --train-data-path {dataset}", base)
    config = parse(f"--train-data-path {dataset} --valid-data-path {dataset}", base)
    assert config.data.split is None and config.data.train_data_path == (dataset,)


def test_missing_dataset_files_are_named(capsys, dataset, tmp_path):
    base = without("--mock-data")
    assert "/no/corpus.idx" in refusal(capsys, "--data-path /no/corpus", base)
    (tmp_path / "half.idx").touch()
    assert "half.bin" in refusal(capsys, f"--data-path 1 {dataset} 2 {tmp_path / 'half'}", base)
    config = parse(f"--data-path 1 {dataset} 2 {dataset}", base)
    assert config.data.data_path == ("1", dataset, "2", dataset)


def test_blends():
    assert split_blend(("a",)) == (["a"], None)
    assert split_blend(("a", "b")) == (["a", "b"], None)
    assert split_blend(("0.3", "a", "0.7", "b")) == (["a", "b"], [0.3, 0.7])
    with pytest.raises(ConfigError, match="mixes weights and prefixes"):
        split_blend(("0.3", "a", "b", "c"))


def test_tokenizers_that_may_exist(monkeypatch, tmp_path):
    (tmp_path / "spm.model").touch()
    flags = f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {tmp_path}/spm.model"
    assert parse(flags).tokenizer.tokenizer_model.endswith("spm.model")
    monkeypatch.setattr("importlib.util.find_spec", lambda package: package == "transformers")
    for model in ("gpt2", "owner/name", str(tmp_path)):
        parse(f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {model} --transformer-impl local")


def test_huggingface_needs_its_package(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    flags = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model gpt2"
    assert "needs the package transformers" in refusal(capsys, flags)


def test_other_workers_let_the_first_one_speak(capsys, monkeypatch):
    waits = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(first_worker.time, "sleep", waits.append)
    refusal(capsys, "--lr 0")
    assert waits and waits[0] > 0
    with pytest.raises(SystemExit):
        parse("--print-config")
    assert capsys.readouterr().out == ""


# --- presets, files, precedence


RUN = "--micro-batch-size 1 --train-iters 5 --lr 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 9"


def write(tmp_path, content):
    path = tmp_path / "config.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def test_preset_then_file_then_command_line(tmp_path):
    path = write(tmp_path, {"network": {"num_layers": 8, "hidden_size": 256}, "seed": 7})
    config = parse(f"--model tiny --config {path} --hidden-size 64", RUN)
    assert config.model == "tiny"
    assert config.network.hidden_size == 64  # command line
    assert (config.network.num_layers, config.rng.seed) == (8, 7)  # file
    assert config.moe.num_experts == 8  # preset
    assert config.network.ffn_hidden_size == 256  # follows from what is in force


def test_presets_are_overridden_flag_by_flag():
    assert parse("--model gpt-125m-8e --moe-layer-freq 3", RUN).moe.expert_layers(12) == (1, 0, 0) * 4
    assert not parse("--model qwen-moe-14b --no-swiglu", RUN).network.swiglu
    dense = parse("--model tiny --num-experts none", RUN)
    assert dense.moe.num_experts is None and dense.network.num_layers == 4


@pytest.mark.parametrize(
    "content",
    [
        {"num_layers": 6},
        {"num-layers": 6},
        {"network": {"num-layers": 6}},
        {"--num-layers": "6"},
        {"num_layers": 6.0},
    ],
)
def test_keys_are_spelled_as_one_likes(tmp_path, content):
    assert read_config_file(write(tmp_path, content)).keys() == {"num_layers"}
    path = write(tmp_path, content)
    assert parse(f"--config {path}", without("--num-layers")).network.num_layers == 6


def test_aliases_and_negations_are_keys_too(tmp_path):
    path = write(tmp_path, {"topk": 3, "no-load-optim": True, "disable_bias_linear": False, "moe": {"topk": 3}})
    with pytest.raises(ConfigError, match="gives moe_router_topk twice"):
        read_config_file(path)
    path = write(tmp_path, {"topk": 3, "no-load-optim": True, "disable_bias_linear": False})
    values = {"moe_router_topk": 3, "load_optim": False, "add_bias_linear": True}
    assert read_config_file(path) == values


@pytest.mark.parametrize(
    "content, sentence",
    [
        ({"hiden_size": 1}, "hiden_size in .* is not a flag: did you mean hidden_size"),
        ({"network": {"seed": 1}}, "seed in .* does not belong below network"),
        ({"qwertyuiop": 1}, "see --help"),
        ({"swiglu": "yes"}, "--swiglu takes true or false; change 'yes'"),
        ({"hidden_size": True}, "--hidden-size takes a whole number; change True"),
        ({"hidden_size": 1.5}, "--hidden-size takes a whole number"),
        ({"hidden_size": float("inf")}, "--hidden-size takes a whole number"),
        ({"no_swiglu": 1}, "takes true or false"),
        ({"rotary_base": None}, "--rotary-base needs a value"),
        ({"save": ["a"]}, "--save takes a word"),
        ({"model": "huge"}, "'huge' of .* is not one of"),
        ({"model": ["tiny"]}, "is not one of"),
        ([1], "does not hold keys and values"),
        ("a: [", "is not YAML"),
    ],
)
def test_files_that_are_refused(capsys, tmp_path, content, sentence):
    assert re.search(sentence, refusal(capsys, f"--config {write(tmp_path, content)}", ""))


def test_the_stronger_of_two_ways_to_say_a_thing_wins(tmp_path, dataset):
    base = without("--train-iters", without("--mock-data"))
    path = write(tmp_path, {"train_iters": 5, "mock_data": True, "bf16": True})
    config = parse(f"--config {path} --train-samples 40 --data-path {dataset} --fp16", base)
    assert (config.training.train_iters, config.training.train_samples) == (None, 40)
    assert not config.data.mock_data and not config.mixed_precision.bf16 and config.mixed_precision.fp16


def test_two_models_contradict(capsys, tmp_path):
    path = write(tmp_path, {"model": "tiny"})
    assert "contradicts" in refusal(capsys, f"--model micro --config {path}")
    assert parse(f"--config {path}").model == "tiny"


def printed(capsys, flags, base=BASE):
    with pytest.raises(SystemExit) as exit:
        parse(f"{flags} --print-config", base)
    assert exit.value.code == 0
    return capsys.readouterr().out


def test_print_config_is_read_again(capsys, tmp_path, dataset):
    flags = f"--model gpt-125m-8e --data-path 0.5 {dataset} 0.5 {dataset} --bf16 --lr-warmup-fraction 0.01"
    base = without("--mock-data")
    text = printed(capsys, flags, base)
    assert parse(f"--config {write(tmp_path, text)}", "") == parse(flags, base)
    assert yaml.safe_load(text)["moe"]["moe_layer_freq"] == [0, 1, 0, 1]
    json.dumps(yaml.safe_load(text))


SIMPLE = {
    name: flag
    for name, flag in all_flags().items()
    if not flag.required and flag.parse is None and flag.kind is not tuple and not name.startswith("tokenizer")
}


def values_of(flag):
    if flag.choices:
        return st.sampled_from(flag.choices)
    at_least, above, at_most, below = flag.limits
    if flag.kind is bool:
        return st.booleans()
    if flag.kind is int:
        return st.integers(at_least or 0, 64)
    if flag.kind is float:
        low = at_least if at_least is not None else above or 0
        high = at_most or below or 10
        return st.floats(low, high, exclude_min=above is not None, exclude_max=below is not None)
    return st.text("abc/", min_size=1, max_size=5)


@st.composite
def random_flags(draw):
    names = draw(st.lists(st.sampled_from(sorted(SIMPLE)), max_size=6, unique=True))
    return {name: draw(values_of(SIMPLE[name])) for name in names}


@settings(deadline=None, max_examples=60)
@given(random_flags())
def test_any_config_that_works_survives_yaml(tmp_path_factory, values):
    base = vars(build_parser().parse_args(shlex.split(BASE)))
    try:
        config = compose({**base, **values})
    except ConfigError as error:
        assert str(error).endswith(".")
        return
    path = write(tmp_path_factory.mktemp("yaml"), config.to_yaml())
    again = read_config_file(path)
    assert again.pop("model") is None
    assert compose(again) == config


def test_replace_derives_anew():
    config = parse()
    smaller = config.replace("network", hidden_size=64)
    assert (smaller.network.ffn_hidden_size, smaller.moe.moe_ffn_hidden_size) == (256, 256)
    assert config.replace("training", train_iters=3).training.train_iters == 3
    assert config.network.hidden_size == 128
    with pytest.raises(AttributeError):
        config.replace("training", hidden_size=1)
    with pytest.raises(ConfigError):
        config.replace("training", micro_batch_size=0)


def test_config_cannot_be_changed_in_place():
    with pytest.raises(AttributeError):
        parse().network.hidden_size = 3
    assert hash(parse().moe) == hash(parse().moe)


# --- the number of workers, and the machine


def test_batches_follow_from_the_number_of_workers():
    config = parse(PP2)
    assert data_parallel_size(config, 8) == 4
    assert (global_batch_size(config, 8), num_microbatches(config, 8)) == (8, 1)
    config = parse(f"{PP2} --global-batch-size 32")
    assert (global_batch_size(config, 8), num_microbatches(config, 8)) == (32, 4)
    assert train_iterations(config, 8) == 10
    samples = parse("--train-samples 70 --global-batch-size 32", without("--train-iters"))
    assert train_iterations(samples, 4) == 2


@pytest.mark.parametrize(
    "flags, world, sentence",
    [
        (PP2, 3, "3 workers are not a multiple of .* start a multiple of 2"),
        (
            "--expert-model-parallel-size 4",
            2,
            "2 workers are not a multiple of --expert-model-parallel-size 4",
        ),
        (f"{PP2} --expert-model-parallel-size 4", 4, "start a multiple of 8"),
        ("--global-batch-size 10", 4, "--global-batch-size 10 is not a multiple of 8, .* make it 8"),
        (f"{PP2} --num-virtual-stages-per-pipeline-rank 2", 2, "a multiple of 2 micro batches, not 1"),
    ],
)
def test_worlds_that_do_not_fit(flags, world, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_world(parse(flags), world)


def test_too_few_samples_for_one_batch():
    config = parse("--train-samples 3 --global-batch-size 4", without("--train-iters"))
    with pytest.raises(ConfigError, match="do not fill one batch of 4"):
        check_world(config, 1)


@pytest.mark.parametrize(
    "flags, world",
    [
        ("", 1),
        (f"{PP2} --expert-model-parallel-size 2", 4),
        (f"{TP2} --expert-model-parallel-size 2", 2),
        (f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 8", 2),
    ],
)
def test_worlds_that_fit(flags, world):
    check_world(parse(flags), world)


def test_gloo_cannot_do_everything():
    split = "--tensor-model-parallel-size 2 --sequence-parallel --disable-bias-linear "
    split += "--expert-model-parallel-size 2"
    check_backend(parse(split), "gloo")
    alltoall = parse(f"{split} --moe-token-dispatcher-type alltoall")
    check_backend(alltoall, "nccl")
    with pytest.raises(ConfigError, match="choose allgather"):
        check_backend(alltoall, "gloo")
    check_backend(alltoall.replace("parallel", expert_tensor_parallel_size=1), "gloo")


def test_kernels_that_need_cuda(monkeypatch):
    for module in (derive, together):
        monkeypatch.setattr(module, "installed", lambda package: True)
    for flags in ("--moe-grouped-gemm --disable-bias-linear", "--moe-permute-fusion"):
        config = parse(f"{flags} --transformer-impl local")
        check_backend(config, "nccl")
        with pytest.raises(ConfigError, match="needs CUDA"):
            check_backend(config, "gloo")
    with pytest.raises(ConfigError, match="choose --transformer-impl local"):
        check_backend(parse(), "gloo")


# --- injected faults


def test_faults_are_read_from_words_semicolons_and_files():
    one, other = "kill rank=1 iteration=2", "stop rank=0 iteration=3 point=loading"
    log = "--log-dir log"
    expected = ("kill ranks=1 iteration=2 point=start", "stop ranks=0 iteration=3 point=loading")
    assert parse(f'{log} --inject "{one}" "{other}"').faults.inject == expected
    config = parse(f'{log} --inject "{one}; {other}"')
    assert config.faults.inject == expected
    assert compose(config.given | {"inject": list(expected)}).faults == config.faults
    assert [str(fault) for fault in config.faults.planned(2, 10)] == list(expected)


def test_faults_that_cannot_be_are_refused(capsys):
    assert "does not say when" in refusal(capsys, '--log-dir log --inject "kill rank=1"')
    assert "--log-dir" in refusal(capsys, '--inject "kill rank=1 iteration=2"')
    assert "--inject-mtbf-iterations" in refusal(capsys, "--inject-seed 3")
