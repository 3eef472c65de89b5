"""Flags that are refused, and with which sentence."""

import os
import re

import pytest

from megatron.pretraining.config import (
    ConfigError,
    compose,
    derive,
    split_blend,
    together,
)
from megatron.pretraining.process import rank0 as first_worker
from tests.unit.pretraining.flags import DENSE, PP2, TP2, parse, refusal, without

SHARED = "--moe-shared-expert-intermediate-size 64 --disable-bias-linear"

REFUSED = [
    (
        "--reset-attention-mask --pipeline-model-parallel-size 4 --num-layers 4 --transformer-impl local",
        "--reset-attention-mask reaches only the first and the last",
    ),
    ("--qk-layernorm-full-width", "needs --qk-layernorm: add it"),
    (f"{TP2} --qk-layernorm --qk-layernorm-full-width", "make it 1, or drop --qk-layernorm-full-width"),
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
    ("--moe-shared-expert-gate", "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size: add it"),
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
    ("--ckpt-policy selective --ckpt-dir x --selective-boost 0.1", "no expert has tokens to make up"),
    (
        "--ckpt-policy selective --ckpt-dir x --selective-boost-iterations 9 --moe-expert-capacity-factor 1 "
        "--moe-pad-expert-input-to-capacity",
        "--selective-boost-iterations needs --moe-expert-capacity-factor without --moe-pad",
    ),
    ("--ckpt-policy auto --ckpt-dir x --selective-boost 0.1", "or drop --selective-boost"),
    # network
    ("--num-attention-heads 3", "--hidden-size 128 is not a multiple of --num-attention-heads 3"),
    ("--num-query-groups 2", "--group-query-attention: add it"),
    ("--group-query-attention --num-query-groups 3", "not a multiple of --num-query-groups 3"),
    ("--swiglu --squared-relu", "exclude each other"),
    ("--max-position-embeddings 32", "--max-position-embeddings 32 is less than --seq-length 64"),
    # precision
    ("--main-params-dtype bf16", "must be in bf16: add --bf16"),
    ("--optimizer sgd --exp-avg-dtype fp8", "--optimizer sgd has none: drop them"),
    ("--max-snapshot-lag 1", "--max-snapshot-lag needs --ckpt-policy: add --ckpt-policy "),
    ("--main-params-dtype bf16 --bf16 --accumulate-allreduce-grads-in-fp32", "drop --accumulate-allreduce-grads"),
    ("--main-params-dtype bf16 --bf16 --use-distributed-optimizer", "drop --use-distributed-optimizer"),
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
    (
        "--fp8-format e4m3 --bf16 --fp8-recipe blockwise --transformer-impl local",
        "--fp8-recipe blockwise needs Transformer Engine",
    ),
    (
        "--fp8-format e4m3 --bf16 --moe-grouped-gemm --num-experts 4 --transformer-impl local",
        "--fp8-format does not reach --moe-grouped-gemm",
    ),
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
    ("--ckpt-dir x", "--ckpt-dir needs --ckpt-policy: add --ckpt-policy "),
    ("--ckpt-blocking", "--ckpt-blocking needs --ckpt-policy: add --ckpt-policy "),
    ("--ckpt-tier memory", "--ckpt-tier needs --ckpt-policy: add --ckpt-policy "),
    ("--snapshot-interval 5", "--snapshot-interval needs --ckpt-policy: add --ckpt-policy "),
    ("--pec-k 2", "--pec-k needs --ckpt-policy: add --ckpt-policy "),
    ("--ckpt-policy full --save x --pec-k 2", "--pec-k needs --ckpt-policy pec, not full"),
    ("--ckpt-policy pec --save x --pec-k 2 --pec-k-persist 3", "--pec-k-persist 3 is more than the 2 experts"),
    (
        "--ckpt-policy pec --save x --pec-k-snapshot 4 --pec-k-persist 1",
        "of the 4 experts in a snapshot, 1 would go on .* drop --pec-k-snapshot and --pec-k-persist, or choose",
    ),
    (
        "--ckpt-policy pec --save x --pec-k 4 --pec-k-persist 1 --ckpt-tier disk",
        "of the 4 experts in a snapshot, 1 would go on to --ckpt-dir, but with --ckpt-tier disk all of them are there",
    ),
    (
        "--ckpt-policy pec --save x --pec-dynamic-k --pec-target optimizer",
        "--pec-dynamic-k goes by tokens that weights have lost.*so it would never act: drop one of them",
    ),
    ("--ckpt-policy pec --save x --pec-plt-limit 0.1", "--pec-plt-limit needs --pec-dynamic-k or --pec-k auto"),
    (
        "--ckpt-policy selective --save x --ckpt-tier memory --selective-gradients on --optimizer sgd",
        "--selective-gradients on is for Adam, .* not sgd: take adam, or drop --selective-gradients",
    ),
    (
        "--ckpt-policy selective --save x --selective-gradients on",
        "--selective-gradients on needs the snapshots of every iteration in memory: add --ckpt-tier memory or peers",
    ),
    ("--ckpt-policy pec --save x --pec-k 0", "take auto or a number of at least 1, not 0"),
    ("--ckpt-policy pec --save x --pec-k auto --pec-k-persist 1", "--pec-k auto chooses how many experts go where"),
    ("--ckpt-policy full --save x --sparse-window 2", "--sparse-window needs --ckpt-policy sparse, not full"),
    ("--ckpt-policy sparse --save x --sparse-window 0", "take auto or a number of at least 1, not 0"),
    ("--ckpt-policy sparse --save x --snapshot-interval 5", "takes a snapshot in every iteration, not in every 5th"),
    ("--upstream-logging", "--upstream-logging needs --ckpt-policy: add --ckpt-policy "),
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
    ("--ckpt-policy full --save x --selective-hide bubble", "--selective-hide needs --ckpt-policy selective, not full"),
    ("--ckpt-policy selective --save x --selective-hide bubble", "there is one stage: raise --pipeline-model-parallel"),
    ("--ckpt-policy auto --save x --selective-hide bubble", "there is one stage: raise --pipeline-model-parallel-size"),
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
    ("--ckpt-policy full --save x --ckpt-tier memory --replicas 1", "--replicas needs --ckpt-tier peers"),
    (
        "--ckpt-policy full --save x --ckpt-tier memory --replication-rate 0.5",
        "--replication-rate needs --ckpt-tier peers",
    ),
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


def test_bubbles_are_chosen_by_for_experts(capsys):
    flags = f"{PP2} --ckpt-policy selective --save x --selective-hide bubble"
    assert "--selective-hide bubble chooses experts" in refusal(capsys, flags, DENSE)
    assert parse(flags).snapshot.selective_hide == "bubble"


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
    for weight in ("0", "-1", "inf", "nan"):
        with pytest.raises(ConfigError, match="not above 0"):
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
    assert "owner/name is a name on the hub" in refusal(capsys, flags)


def test_a_directory_has_no_commit(capsys, tmp_path):
    flags = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path} --tokenizer-revision {'0a' * 20}"
    assert "--tokenizer-revision is for the name of" in refusal(capsys, flags)


def test_jobs_are_offline_unless_told_otherwise(monkeypatch):
    from pretrain_gpt_moe import prepare_core

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    prepare_core()
    assert os.environ["HF_HUB_OFFLINE"] == "0"
    monkeypatch.delenv("HF_HUB_OFFLINE")
    prepare_core()
    assert os.environ["HF_HUB_OFFLINE"] == "1"


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
