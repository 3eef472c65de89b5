"""The planner's operators are those of any model that Megatron-LM's options describe."""

from megatron.pretraining.planning.model import config_of, meta_operators
from tests.cases import each_row
from tests.errors import raises

SMALL = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 4 --make-vocab-size-divisible-by 1".split()
OF_MEGATRON_DEEPSPEED = "--expert-interval 2 --topk 1 --moe-expert-parallel-size 2 --train-tokens 4096".split()


def operators(words="", vocab_size=10, **layout):
    """Parameters and unsliced ones, by operator."""
    found = meta_operators(config_of(None, [*SMALL, *words.split()], **layout), None, vocab_size)
    return {operator.name: (operator.parameters, operator.unsliced) for operator in found}


def total(words="", *names):
    """Parameters of the operators whose names contain one of these."""
    return sum(count for name, (count, _) in operators(words).items() if any(one in name for one in names or [""]))


def test_dense_model_parameters_match_manual_count():
    attention = (16 + 8 * 24 + 24 + 8 * 8 + 8, 16 + 8)  # norm, queries with keys and values, projection
    feed_forward = (16 + 8 * 32 + 32 + 32 * 8 + 8, 16 + 8)
    assert operators() == {
        "embedding": (10 * 8 + 4 * 8, 4 * 8),
        **{f"layers.{number}.attention": attention for number in (0, 1)},
        **{f"layers.{number}.mlp": feed_forward for number in (0, 1)},
        "output": (16, 16),
    }


def test_expert_parameters_match_manual_count():
    words = (
        "--num-experts 4 --moe-ffn-hidden-size 16 --moe-router-topk 1 --moe-router-pre-softmax --moe-layer-freq [0,1] "
        "--moe-shared-expert-intermediate-size 5 --swiglu --ffn-hidden-size 20 --disable-bias-linear "
        "--normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights"
    )
    attention = (8 + 8 * 24 + 8 * 8, 8)
    assert operators(words) == {
        "embedding": (10 * 8, 0),
        "layers.0.attention": attention,
        "layers.0.mlp": (8 + 3 * 8 * 20, 8),
        "layers.1.attention": attention,
        "layers.1.mlp": (8 + 3 * 8 * 5, 8),
        "layers.1.router": (4 * 8, 4 * 8),
        **{f"layers.1.expert.{number}": (3 * 8 * 16, 0) for number in range(4)},
        "output": (8 + 10 * 8, 8),
    }


def test_expert_and_router_biases_follow_linear_layers():
    attention, expert, router = 24 + 8, 32 + 8, 4
    difference = total("--num-experts 4") - total("--num-experts 4 --disable-bias-linear")
    assert difference == 2 * (attention + 4 * expert + router)


def test_grouped_queries_need_fewer_parameters():
    words = "--disable-bias-linear --kv-channels 8"
    grouped = f"{words} --group-query-attention --num-query-groups 1"
    assert total(words) - total(grouped) == 2 * (2 * 8 * 8)


def test_latent_attention_parameters_match_manual_count():
    words = (
        "--multi-latent-attention --kv-lora-rank 4 --q-lora-rank 3 --qk-head-dim 4 --qk-pos-emb-head-dim 2 "
        "--v-head-dim 4 --disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
    )
    queries, keys_and_values = 8 * 3 + 3 * 2 * (4 + 2), 8 * (4 + 2) + 4 * 2 * (4 + 4)
    assert operators(words)["layers.0.attention"][0] == 8 + queries + keys_and_values + 2 * 4 * 8


def test_mtp_depth_is_layer_after_decoder_layers():
    words = "--num-experts 4 --disable-bias-linear --position-embedding-type rope"
    found = operators(f"{words} --mtp-num-layers 1")
    assert {name: found[name] for name in operators(words)} == operators(words)
    assert found["layers.2.expert.3"] == found["layers.1.expert.3"]
    assert found["layers.2.attention"][0] > found["layers.1.attention"][0]  # and its projection and norms


@each_row(
    ("words", "workers"),
    [
        ("--tensor-model-parallel-size 2", 2),
        ("--pipeline-model-parallel-size 2 --expert-model-parallel-size 4", 8),
        ("--context-parallel-size 2 --expert-model-parallel-size 4", 4),
        ("--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --expert-model-parallel-size 4", 4),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1", 2),
    ],
)
def test_model_is_independent_of_layout(words, workers):
    model = "--num-experts 4 --disable-bias-linear"
    assert config_of(None, [*SMALL, *model.split(), *words.split()]).arguments.world_size == workers
    assert operators(f"{model} {words}") == operators(model)


def test_run_options_do_not_change_model():
    words = (
        "--bf16 --use-distributed-optimizer --overlap-grad-reduce --train-samples 1000 --lr 1e-3 --global-batch-size 6 "
        "--data-path data --tokenizer-type HuggingFaceTokenizer --tokenizer-model model --save here --ckpt-policy full "
        "--ckpt-dir there --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    )
    assert operators(words) == operators()


def test_megatron_deepspeed_command_line_is_planned():
    """Its defaults: the last of every two layers has experts, which ZeRO does not change."""
    words = [*SMALL, *"--max-position-embeddings 4 --num-experts 4 --deepspeed --zero-stage 1".split()]
    config = config_of(None, [*words, *OF_MEGATRON_DEEPSPEED])
    assert (config.moe.moe_router_topk, config.parallel.expert_model_parallel_size) == (1, 2)
    assert {o.layer for o in meta_operators(config, None, 10) if o.expert is not None} == {1}


def test_model_requiring_cuda_is_refused():
    with raises("device-unsupported"):
        config_of(None, [*SMALL, "--hybrid-layer-pattern", "M*"])
