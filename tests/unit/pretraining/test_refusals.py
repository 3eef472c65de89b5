"""Flags that are refused, and with which sentence."""

import os

import pytest

from megatron.pretraining.config import (
    compose,
    derive,
    split_blend,
    together,
)
from megatron.pretraining.process import rank0 as first_worker
from tests.errors import raises
from tests.unit.pretraining.flags import DENSE, PP2, TP2, assert_refused, parse, refusal, without

SHARED = "--moe-shared-expert-intermediate-size 64 --disable-bias-linear"

REFUSED = [
    (
        "--reset-attention-mask --pipeline-model-parallel-size 4 --num-layers 4 --transformer-impl local",
        "pipeline-excludes-flag --reset-attention-mask",
    ),
    ("--qk-layernorm-full-width", "flag-needs-another --qk-layernorm"),
    (
        f"{TP2} --qk-layernorm --qk-layernorm-full-width",
        "flag-needs-another expert-split-unsupported --qk-layernorm-full-width",
    ),
    # experts
    (
        "--num-experts 6 --expert-model-parallel-size 4",
        "flag-not-a-multiple --num-experts --expert-model-parallel-size",
    ),
    ("--tensor-model-parallel-size 2", "experts-need-flag expert-biases-unsupported --sequence-parallel"),
    ("--tensor-model-parallel-size 2 --sequence-parallel", "expert-biases-unsupported --disable-bias-linear"),
    ("--topk 9", "flag-exceeds-another --moe-router-topk --num-experts"),
    ("--topk 1", "router-without-gradient --moe-router-pre-softmax"),
    ("--moe-router-enable-expert-bias", "flag-needs-another --moe-router-score-function"),
    ("--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 1", "flag-has-no-effect --moe-aux-loss-coeff"),
    (
        "--moe-expert-capacity-factor 1 --moe-router-load-balancing-type sinkhorn",
        "capacity-balancing-conflict --moe-expert-capacity-factor",
    ),
    ("--moe-pad-expert-input-to-capacity", "flag-needs-another --moe-expert-capacity-factor"),
    (
        "--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor -1",
        "flag-needs-another --moe-expert-capacity-factor",
    ),
    ("--moe-shared-expert-gate", "flag-needs-another --moe-shared-expert-gate --moe-shared-expert-intermediate-size"),
    ("--moe-shared-expert-overlap", "flag-needs-another flag-needs-another --moe-shared-expert-intermediate-size"),
    (f"--moe-shared-expert-overlap {SHARED}", "flag-needs-another --moe-token-dispatcher-type"),
    ("--moe-shared-expert-intermediate-size 64", "expert-biases-unsupported --disable-bias-linear"),
    ("--moe-router-num-groups 2", "flag-needs-another"),
    ("--moe-router-num-groups 3 --moe-router-group-topk 1", "flag-not-a-multiple --moe-router-num-groups"),
    (
        "--moe-router-num-groups 2 --moe-router-group-topk 3",
        "flag-exceeds-another router-groups-too-small --moe-router-group-topk",
    ),
    ("--moe-router-num-groups 8 --moe-router-group-topk 1", "router-groups-too-small --moe-router-topk"),
    ("--moe-layer-freq [0,1]", "layer-pattern-mismatch --num-layers"),
    ("--moe-layer-freq [0]*4", "layer-pattern-mismatch"),
    ("--expert-interval 5", "layer-pattern-mismatch"),
    ("--expert-interval 2 --moe-layer-freq 2", "flags-exclude-each-other"),
    ("--moe-layer-freq x", "value-unreadable --moe-layer-freq"),
    (
        f"{TP2} --moe-ffn-hidden-size 3 --disable-bias-linear --expert-tensor-parallel-size 2",
        "flag-not-a-multiple --moe-ffn-hidden",
    ),
    ("--ckpt-policy selective --ckpt-dir x --selective-boost 0.1", "flag-needs-another"),
    (
        "--ckpt-policy selective --ckpt-dir x --selective-boost-iterations 9 --moe-expert-capacity-factor 1 "
        "--moe-pad-expert-input-to-capacity",
        "flag-needs-another --selective-boost-iterations --moe-expert-capacity-factor --moe-pad",
    ),
    ("--ckpt-policy auto --ckpt-dir x --selective-boost 0.1", "flag-needs-another --selective-boost"),
    # network
    ("--num-attention-heads 3", "flag-not-a-multiple --hidden-size --num-attention-heads"),
    ("--num-query-groups 2", "flag-has-no-effect --group-query-attention"),
    ("--group-query-attention --num-query-groups 3", "flag-not-a-multiple --num-query-groups"),
    ("--swiglu --squared-relu", "flags-exclude-each-other"),
    ("--max-position-embeddings 32", "sequence-too-long --max-position-embeddings --seq-length"),
    # precision
    ("--main-params-dtype bf16", "precision-needs-flag --bf16"),
    ("--optimizer sgd --exp-avg-dtype fp8", "optimizer-excludes-flag --optimizer"),
    ("--max-snapshot-lag 1", "flag-has-no-effect --max-snapshot-lag --ckpt-policy"),
    (
        "--main-params-dtype bf16 --bf16 --accumulate-allreduce-grads-in-fp32",
        "flags-exclude-each-other --accumulate-allreduce-grads",
    ),
    (
        "--main-params-dtype bf16 --bf16 --use-distributed-optimizer",
        "optimizer-excludes-flag --use-distributed-optimizer",
    ),
    # parallelism
    (
        "--tensor-model-parallel-size 8 --sequence-parallel",
        "flag-not-a-multiple flag-not-a-multiple expert-biases-unsupported --num-attention-heads "
        "--tensor-model-parallel",
    ),
    (
        f"{TP2} --group-query-attention",
        "flag-not-a-multiple expert-split-unsupported --num-query-groups --tensor-model-parallel-size",
    ),
    (
        f"{TP2} --seq-length 63",
        "flag-not-a-multiple expert-split-unsupported --seq-length --tensor-model-parallel-size",
    ),
    (
        "--pipeline-model-parallel-size 3",
        "flag-not-a-multiple --num-layers --pipeline-model-parallel-size",
    ),
    ("--num-layers-per-virtual-pipeline-stage 1", "flag-needs-another --pipeline-model-parallel-size"),
    ("--num-virtual-stages-per-pipeline-rank 2", "flag-needs-another --pipeline-model-parallel-size"),
    (
        f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 1",
        "flags-exclude-each-other",
    ),
    (f"{PP2} --num-layers 6 --num-layers-per-virtual-pipeline-stage 2", "layers-not-divisible"),
    (f"{PP2} --num-layers 6 --num-virtual-stages-per-pipeline-rank 2", "layers-not-divisible"),
    (
        f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
        "pipeline-needs-flag --overlap-p2p-communication",
    ),
    ("--context-parallel-size 2", "flag-unsupported"),
    ("--overlap-param-gather --overlap-grad-reduce", "flag-needs-another --use-distributed-optimizer"),
    ("--overlap-param-gather --use-distributed-optimizer", "flag-needs-another --overlap-grad-reduce"),
    # training
    ("--train-samples 5", "flags-exclude-each-other --train-iters --train-samples"),
    ("--global-batch-size 3", "flag-not-a-multiple --global-batch-size --micro-batch-size"),
    ("--manual-gc-interval 2", "flag-needs-another --manual-gc"),
    ("--recompute-granularity full", "recompute-flags-incomplete --recompute-method --recompute-num-layers"),
    ("--recompute-method uniform", "recompute-flags-incomplete --recompute-granularity"),
    ("--recompute-activations --recompute-granularity full", "flags-exclude-each-other recompute-flags-incomplete"),
    ("--micro-batch-size 0", "value-out-of-range --micro-batch-size"),
    ("--micro-batch-size two", "value-unreadable --micro-batch-size"),
    ("--exit-signal SIGKILL", "value-not-a-choice --exit-signal"),
    # learning rate
    ("--lr nan", "value-out-of-range --lr"),
    ("--lr 0", "value-out-of-range --lr"),
    ("--min-lr 1", "flag-exceeds-another --min-lr --lr"),
    ("--lr-warmup-init 1", "flag-exceeds-another --lr-warmup-init --lr"),
    ("--lr-warmup-iters 10", "warmup-too-long --lr-warmup-iters --train-iters"),
    ("--lr-warmup-iters 5 --lr-decay-iters 5", "warmup-too-long --lr-warmup-iters --lr-decay-iters"),
    ("--lr-warmup-fraction 0.1 --lr-warmup-iters 1", "flags-exclude-each-other"),
    ("--lr-warmup-fraction 1", "value-out-of-range --lr-warmup-fraction"),
    ("--lr-decay-style WSD", "flag-needs-another --lr-wsd-decay-iters"),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 11", "warmup-too-long --lr-wsd-decay-iters --train-iters"),
    ("--lr-decay-samples 9", "training-length-unit-differs --lr-decay-samples --train-iters --lr-decay-iters"),
    ("--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler", "flags-exclude-each-other"),
    # regularization and precision
    ("--start-weight-decay 0.5", "weight-decay-style-conflict --weight-decay-incr-style"),
    ("--weight-decay-incr-style linear", "weight-decay-style-conflict --start-weight-decay --end-weight-decay"),
    (
        "--weight-decay-incr-style linear --start-weight-decay 2 --end-weight-decay 1",
        "flag-exceeds-another --start-weight-decay",
    ),
    ("--hidden-dropout 1", "value-out-of-range --hidden-dropout"),
    ("--fp16 --bf16", "flags-exclude-each-other --fp16 --bf16"),
    ("--fp8-format hybrid", "precision-needs-flag --bf16 --fp16"),
    ("--fp8-format hybrid --bf16 --fp8-recipe delayed", "fp8-recipe-unsupported"),
    (
        "--fp8-format e4m3 --bf16 --fp8-recipe blockwise --transformer-impl local",
        "package-missing --fp8-recipe",
    ),
    (
        "--fp8-format e4m3 --bf16 --moe-grouped-gemm --num-experts 4 --transformer-impl local",
        "package-missing fp8-excludes-flag expert-biases-unsupported --fp8-format --moe-grouped-gemm",
    ),
    ("--fp32-residual-connection", "flag-has-no-effect --fp16 --bf16"),
    ("--initial-loss-scale 0.5", "flag-exceeds-another --min-loss-scale --initial-loss-scale"),
    # data and tokenizer
    (
        "--data-path /nowhere/corpus",
        "flags-exclude-each-other data-file-missing --data-path --mock-data",
    ),
    ("--split 9,x", "split-malformed --split"),
    ("--split 0,0", "split-malformed --split"),
    ("--tokenizer-type SentencePieceTokenizer", "tokenizer-incomplete --tokenizer-model"),
    ("--tokenizer-type HuggingFaceTokenizer", "tokenizer-incomplete --tokenizer-model"),
    ("--tokenizer-type SentencePieceTokenizer --tokenizer-model /no/model", "tokenizer-missing"),
    ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model /no/model", "tokenizer-missing"),
    ("--tokenizer-type GPT2", "value-not-a-choice --tokenizer-type"),
    # checkpoints, evaluation, logging
    ("--async-save", "flag-needs-another --async-save --save"),
    ("--save-interval 5", "flag-needs-another --save-interval --save"),
    ("--save x --save-retain-interval 5", "flag-needs-another --save-retain-interval --save-interval"),
    ("--save x --save-interval 2 --save-retain-interval 5", "flag-not-a-multiple --save-interval"),
    ("--ckpt-step 5", "flag-needs-another --ckpt-step --load --ckpt-policy"),
    ("--finetune", "flag-needs-another --finetune --load"),
    ("--exit-on-missing-checkpoint", "flag-needs-another --exit-on-missing-checkpoint --load"),
    ("--ckpt-format torch", "value-not-a-choice --ckpt-format"),
    # snapshots
    ("--ckpt-policy full", "snapshot-directory-missing --ckpt-policy --ckpt-dir --save"),
    ("--ckpt-policy some --save x", "value-not-a-choice --ckpt-policy"),
    ("--ckpt-dir x", "flag-has-no-effect --ckpt-dir --ckpt-policy"),
    ("--ckpt-blocking", "flag-has-no-effect --ckpt-blocking --ckpt-policy"),
    ("--ckpt-tier memory", "flag-has-no-effect --ckpt-tier --ckpt-policy"),
    ("--snapshot-interval 5", "flag-has-no-effect --snapshot-interval --ckpt-policy"),
    ("--pec-k 2", "flag-has-no-effect --pec-k --ckpt-policy"),
    ("--ckpt-policy full --save x --pec-k 2", "policy-lacks-flag --pec-k --ckpt-policy"),
    (
        "--ckpt-policy pec --save x --pec-k 2 --pec-k-persist 3",
        "flag-exceeds-another --pec-k-persist",
    ),
    (
        "--ckpt-policy pec --save x --pec-k-snapshot 4 --pec-k-persist 1",
        "tier-lacks-flag --pec-k-snapshot --pec-k-persist",
    ),
    (
        "--ckpt-policy pec --save x --pec-k 4 --pec-k-persist 1 --ckpt-tier disk",
        "tier-lacks-flag --ckpt-dir --ckpt-tier",
    ),
    (
        "--ckpt-policy pec --save x --pec-dynamic-k --pec-target optimizer",
        "flag-has-no-effect --pec-dynamic-k",
    ),
    ("--ckpt-policy pec --save x --pec-plt-limit 0.1", "flag-needs-another --pec-plt-limit --pec-dynamic-k --pec-k"),
    (
        "--ckpt-policy selective --save x --ckpt-tier memory --selective-gradients on --optimizer sgd",
        "gradients-need-adam --selective-gradients",
    ),
    (
        "--ckpt-policy selective --save x --selective-gradients on",
        "gradients-need-memory --selective-gradients --ckpt-tier",
    ),
    ("--ckpt-policy pec --save x --pec-k 0", "value-unreadable"),
    ("--ckpt-policy pec --save x --pec-k auto --pec-k-persist 1", "flag-chosen-by-auto --pec-k"),
    ("--ckpt-policy full --save x --sparse-window 2", "policy-lacks-flag --sparse-window --ckpt-policy"),
    ("--ckpt-policy sparse --save x --sparse-window 0", "value-unreadable"),
    ("--ckpt-policy sparse --save x --snapshot-interval 5", "snapshot-interval-fixed"),
    (
        "--upstream-logging",
        "flag-has-no-effect --upstream-logging --ckpt-policy",
    ),
    (
        "--ckpt-policy full --save x --upstream-logging",
        "policy-lacks-flag --upstream-logging --ckpt-policy",
    ),
    (
        "--ckpt-policy sparse --save x --upstream-log-limit 2",
        "flag-needs-another --upstream-log-limit --upstream-logging",
    ),
    (
        "--ckpt-policy sparse --save x --upstream-logging --untie-embeddings-and-output-weights",
        "upstream-logging-unsupported --upstream-logging --pipeline-model-parallel-size",
    ),
    (
        "--ckpt-policy sparse --save x --upstream-logging --pipeline-model-parallel-size 2",
        "upstream-logging-unsupported --untie-embeddings-and-output-weights",
    ),
    (
        "--ckpt-policy full --save x --selective-hide bubble",
        "policy-lacks-flag --selective-hide --ckpt-policy",
    ),
    ("--ckpt-policy selective --save x --selective-hide bubble", "flag-needs-another --pipeline-model-parallel"),
    ("--ckpt-policy auto --save x --selective-hide bubble", "flag-needs-another --pipeline-model-parallel-size"),
    ("--ckpt-policy full --save x --mtbf-hours 2", "flag-needs-another --mtbf-hours --pec-k"),
    ("--ckpt-policy full --save x --exact-only", "policy-lacks-flag --exact-only --ckpt-policy"),
    ("--ckpt-policy pec --save x --host-memory-gb 8", "policy-lacks-flag --host-memory-gb --ckpt-policy"),
    ("--ckpt-policy auto --save x --host-memory-gb 0", "value-out-of-range --host-memory-gb"),
    ("--ckpt-policy auto --save x --snapshot-interval 5", "flag-chosen-by-auto --snapshot-interval"),
    ("--ckpt-policy auto --save x --pec-k 2", "flag-chosen-by-auto --pec-k"),
    ("--ckpt-policy auto --save x --sparse-window 2", "flag-chosen-by-auto --sparse-window"),
    ("--ckpt-policy auto --save x --ckpt-blocking", "flag-chosen-by-auto --ckpt-blocking"),
    (
        "--ckpt-policy auto --save x --upstream-logging",
        "policy-lacks-flag --upstream-logging --ckpt-policy",
    ),
    ("--ckpt-policy full --save x --node-of-rank 0,1", "tier-lacks-flag --node-of-rank --ckpt-tier"),
    ("--ckpt-policy full --save x --ckpt-tier memory --node-of-rank 0,../1", "value-unreadable"),
    ("--ckpt-policy full --save x --ckpt-tier ram", "value-not-a-choice --ckpt-tier"),
    ("--ckpt-policy full --save x --ckpt-keep 0", "value-out-of-range --ckpt-keep"),
    ("--ckpt-policy full --save x --ckpt-sharding all", "value-unreadable"),
    ("--ckpt-policy full --save x --ckpt-overhead-budget 0", "value-out-of-range --ckpt-overhead-budget"),
    ("--ckpt-policy full --save x --ckpt-overhead-budget 1", "value-out-of-range --ckpt-overhead-budget"),
    ("--ckpt-policy full --save x --snapshot-interval 0", "value-unreadable"),
    ("--ckpt-policy full --save x --snapshot-interval often", "value-unreadable"),
    ("--ckpt-policy full --save x --persist-interval 4", "tier-lacks-flag --persist-interval --ckpt-tier"),
    ("--ckpt-policy full --save x --ckpt-tier memory --replicas 1", "tier-lacks-flag --replicas --ckpt-tier"),
    (
        "--ckpt-policy full --save x --ckpt-tier memory --replication-rate 0.5",
        "tier-lacks-flag --replication-rate --ckpt-tier",
    ),
    ("--ckpt-policy full --save x --ckpt-tier memory --persist-interval 0", "value-out-of-range --persist-interval"),
    (
        "--ckpt-policy full --save x --ckpt-tier memory --snapshot-interval 3 --persist-interval 4",
        "flag-not-a-multiple --persist-interval --snapshot-interval",
    ),
    ("--eval-interval 0", "value-out-of-range --eval-interval"),
    ("--eval-interval -3", "value-out-of-range --eval-interval"),
    ("--log-timers-to-tensorboard", "flag-needs-another --tensorboard-dir"),
    # the command line itself
    ("--hiden-size 64", "flag-unknown --hiden-size --hidden-size"),
    ("--micro 3", "flag-unknown --micro"),
    ("word", "value-without-flag"),
    ("--config /no/file.yaml", "config-file-unreadable --config"),
]


@pytest.mark.parametrize("flags, expected", REFUSED, ids=[flags[:70] for flags, _ in REFUSED])
def test_refused_with_a_sentence(capsys, flags, expected):
    assert_refused(refusal(flags), expected)


@pytest.mark.parametrize(
    "missing, expected",
    [
        ("--num-layers", "flag-missing --num-layers --model"),
        ("--hidden-size", "flag-missing --hidden-size"),
        ("--num-attention-heads", "flag-missing --num-attention-heads"),
        ("--seq-length", "flag-missing --seq-length"),
        ("--micro-batch-size", "flag-missing --micro-batch-size"),
        ("--train-iters", "training-length-missing --train-iters --train-samples"),
        ("--lr", "flag-missing --lr --config"),
        ("--mock-data", "data-source-missing --data-path --train-data-path --mock-data"),
        ("--tokenizer-type", "flag-missing --tokenizer-type"),
        ("--vocab-size", "tokenizer-incomplete --vocab-size"),
    ],
)
def test_missing_flags_are_named(capsys, missing, expected):
    assert_refused(refusal("", without(missing)), expected)


@pytest.mark.parametrize("flag", ["--moe-router-topk 4", "--moe-z-loss-coeff 1", "--moe-aux-loss-coeff 1", "--topk 1"])
def test_flags_of_experts_need_experts(capsys, flag):
    named = flag.split()[0].replace("--topk", "--moe-router-topk")
    assert_refused(refusal(flag, DENSE), f"flag-has-no-effect {named} --num-experts")


def test_bubbles_are_chosen_by_for_experts(capsys):
    flags = f"{PP2} --ckpt-policy selective --save x --selective-hide bubble"
    assert_refused(refusal(flags, DENSE), "flag-needs-another --selective-hide")
    assert parse(flags).snapshot.selective_hide == "bubble"


def test_expert_parallelism_needs_experts(capsys):
    expected = "flag-needs-another --expert-model-parallel-size --num-experts"
    assert_refused(refusal("--expert-model-parallel-size 2", DENSE), expected)


@pytest.mark.parametrize(
    "flags, package",
    [
        ("--moe-grouped-gemm --disable-bias-linear", "grouped_gemm"),
        ("--moe-permute-fusion", "Transformer Engine"),
        ("--transformer-impl transformer_engine", "Transformer Engine"),
        ("--moe-token-dispatcher-type flex --expert-model-parallel-size 2", "deep_ep"),
    ],
)
def test_kernels_that_are_not_installed(capsys, monkeypatch, flags, package):
    monkeypatch.setattr(together, "installed", lambda package: False)
    codes, sentence = refusal(f"{flags} --transformer-impl local" if "impl" not in flags else flags)
    assert codes == ["package-missing"] and flags.split()[0] in sentence and package in sentence


def test_grouped_gemm_and_biases(capsys, monkeypatch):
    for module in (derive, together):
        monkeypatch.setattr(module, "installed", lambda package: package == "transformer_engine")
    expected = "expert-biases-unsupported --moe-grouped-gemm --no-bias-dropout-fusion"
    assert_refused(refusal("--moe-grouped-gemm"), expected)
    assert parse("--moe-grouped-gemm --no-bias-dropout-fusion").moe.moe_grouped_gemm
    assert parse("--moe-grouped-gemm --disable-bias-linear").moe.moe_grouped_gemm


def test_split_is_not_for_separate_datasets(capsys, dataset):
    base = without("--mock-data")
    divided = refusal(f"--train-data-path {dataset} --split 9,1,0", base)
    assert_refused(divided, "flag-has-no-effect --split --train-data-path")
    alone = refusal(f"--valid-data-path {dataset}", base)
    assert_refused(alone, "data-source-missing --valid-data-path --train-data-path")
    both = refusal(f"--data-path {dataset} --train-data-path {dataset} --split 9,1,0", base)
    assert_refused(both, "flags-exclude-each-other flag-has-no-effect --data-path --train-data-path --split")
    config = parse(f"--train-data-path {dataset} --valid-data-path {dataset}", base)
    assert config.data.split is None and config.data.train_data_path == (dataset,)


def test_missing_dataset_files_are_named(capsys, dataset, tmp_path):
    base = without("--mock-data")
    codes, sentence = refusal("--data-path /no/corpus", base)
    assert codes == ["data-file-missing"] and "/no/corpus.idx" in sentence and "/no/corpus.bin" in sentence
    (tmp_path / "half.idx").touch()
    codes, sentence = refusal(f"--data-path 1 {dataset} 2 {tmp_path / 'half'}", base)
    assert codes == ["data-file-missing"] and "half.bin" in sentence and "half.idx" not in sentence
    config = parse(f"--data-path 1 {dataset} 2 {dataset}", base)
    assert config.data.data_path == ("1", dataset, "2", dataset)


def test_blends():
    assert split_blend(("a",)) == (["a"], None)
    assert split_blend(("a", "b")) == (["a", "b"], None)
    assert split_blend(("0.3", "a", "0.7", "b")) == (["a", "b"], [0.3, 0.7])
    with raises("data-path-malformed"):
        split_blend(("0.3", "a", "b", "c"))
    for weight in ("0", "-1", "inf", "nan"):
        with raises("data-path-malformed"):
            split_blend(("0.3", "a", weight, "b"))


def test_tokenizers_that_may_exist(monkeypatch, tmp_path):
    (tmp_path / "spm.model").touch()
    flags = f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {tmp_path}/spm.model"
    assert parse(flags).tokenizer.tokenizer_model.endswith("spm.model")
    monkeypatch.setattr("importlib.util.find_spec", lambda package: package == "transformers")
    of_the_hub = f"--tokenizer-revision {'0a' * 20}"
    for model in (f"gpt2 {of_the_hub}", f"owner/name {of_the_hub}", str(tmp_path)):
        parse(f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {model} --transformer-impl local")


@pytest.mark.parametrize("revision", ["", "--tokenizer-revision main", f"--tokenizer-revision {'0a' * 19}"])
def test_a_tokenizer_of_the_hub_needs_its_commit(capsys, monkeypatch, revision):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: package == "transformers")
    flags = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model owner/name {revision} --transformer-impl local"
    assert_refused(refusal(flags), "tokenizer-not-pinned --tokenizer-model --tokenizer-revision")


def test_a_directory_has_no_commit(capsys, tmp_path):
    flags = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path} --tokenizer-revision {'0a' * 20}"
    codes, _ = refusal(flags)
    assert "flag-has-no-effect" in codes and "tokenizer-not-pinned" not in codes


def test_jobs_are_offline_unless_told_otherwise(monkeypatch):
    from megatron.pretraining.pretrain_gpt_moe import prepare_core

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    prepare_core()
    assert os.environ["HF_HUB_OFFLINE"] == "0"
    monkeypatch.delenv("HF_HUB_OFFLINE")
    prepare_core()
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_huggingface_needs_its_package(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    flags = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model gpt2"
    codes, sentences = refusal(flags)
    assert "package-missing" in codes and "transformers" in sentences


def test_other_workers_let_the_first_one_speak(capsys, monkeypatch):
    waits = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(first_worker.time, "sleep", waits.append)
    refusal("--lr 0")
    assert waits and waits[0] > 0
    with pytest.raises(SystemExit):
        parse("--print-config")
    assert capsys.readouterr().out == ""


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
    assert_refused(refusal('--log-dir log --inject "kill rank=1"'), "value-unreadable --inject")
    assert_refused(refusal('--inject "kill rank=1 iteration=2"'), "flag-needs-another --inject --log-dir")
    expected = "flag-needs-another --inject-seed --inject-mtbf-iterations"
    assert_refused(refusal("--inject-seed 3"), expected)
