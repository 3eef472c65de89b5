"""Options that are refused, and by which codes."""

from argparse import Namespace

import pytest

from megatron.pretraining.config import ConfigError
from megatron.pretraining.duties import duties_after
from megatron.pretraining.entry.limits import check_run
from megatron.pretraining.process.stopping import StopRequests
from tests.cases import each_row
from tests.errors import only_code
from tests.unit.pretraining.flags import assert_refused, parse, refusal, write

SHARED = "--moe-shared-expert-intermediate-size 64 --disable-bias-linear"

REFUSED = [
    ("--lr-warmup-iters 10", "flag-exceeds-another --lr-warmup-iters --lr-decay-iters --train-iters"),
    ("--lr-warmup-iters 9 --lr-decay-iters 9", "flag-exceeds-another --lr-warmup-iters --lr-decay-iters"),
    (
        "--profile --use-pytorch-profiler --profile-step-start 20",
        "flag-exceeds-another --profile-step-start --profile-step-end",
    ),
    ("--lr-warmup-fraction 1", "value-out-of-range --lr-warmup-fraction"),
    ("--lr-warmup-init 1", "flag-exceeds-another --lr-warmup-init --lr"),
    ("--data-path /nonexistent", "flags-exclude-each-other --mock-data --data-path"),
    ("--moe-layer-freq x", "value-unreadable --moe-layer-freq"),
    ("--ckpt-policy selective --ckpt-dir x --selective-boost 0.1", "flag-needs-another"),
    (
        "--ckpt-policy selective --ckpt-dir x --selective-boost-iterations 9 --moe-expert-capacity-factor 1 "
        "--moe-pad-expert-input-to-capacity",
        "flag-needs-another --selective-boost-iterations --moe-expert-capacity-factor --moe-pad",
    ),
    ("--ckpt-policy auto --ckpt-dir x --selective-boost 0.1", "flag-needs-another --selective-boost"),
    ("--moe-router-topk 9", "value-out-of-range --moe-router-topk --num-experts"),
    ("--moe-router-topk 5 --moe-router-num-groups 4 --moe-router-group-topk 2", "value-out-of-range --num-experts"),
    ("--num-attention-heads 3", "flag-not-a-multiple --hidden-size --num-attention-heads"),
    ("--optimizer sgd --exp-avg-dtype fp8", "optimizer-excludes-flag --optimizer"),
    ("--optimizer sgd --use-distributed-optimizer", "optimizer-excludes-flag --optimizer"),
    ("--max-snapshot-lag 1", "flag-has-no-effect --max-snapshot-lag --ckpt-policy"),
    ("--micro-batch-size two", "value-unreadable --micro-batch-size"),
    ("--tokenizer-type GPT2", "value-not-a-choice --tokenizer-type"),
    ("--ckpt-step 5", "flag-needs-another --ckpt-step --load --ckpt-policy"),
    ("--ckpt-policy full", "snapshot-directory-missing --ckpt-policy --ckpt-dir --save"),
    ("--ckpt-policy full --save x --ckpt-dir ./x", "flags-exclude-each-other --ckpt-dir --save"),
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
    (
        "--ckpt-policy some --ckpt-dir x --ckpt-tier peer --replicas 0",
        "value-not-a-choice value-not-a-choice value-out-of-range --ckpt-policy --ckpt-tier --replicas",
    ),
    (
        "--step-batch-size-schedule 0:2 --global-batch-size 2",
        "flags-exclude-each-other --step-batch-size-schedule --global-batch-size",
    ),
    ("--save '' --load ''", "value-missing value-missing --save --load"),
    ("--ckpt-policy full --save x --ckpt-dir ''", "value-unreadable --ckpt-dir"),
    ("--hiden-size 64", "flag-unknown --hiden-size --hidden-size"),
    ("--micro 3", "flag-unknown --micro"),
    ("word", "value-without-flag"),
    ("--config /no/file.yaml", "config-file-unreadable --config"),
]
OUT_OF_RANGE = """
    --eval-interval 0, --eval-interval -1, --log-interval 0, --log-memory-interval 0,
    --tensorboard-log-interval 0, --exit-interval -1, --exit-duration-in-mins -1, --save x --save-interval 0,
    --manual-gc-interval -1, --train-sync-interval -1, --check-weight-hash-across-dp-replicas-interval 0,
    --start-eval-at-iter -1, --train-iters 0, --seq-length 0, --hidden-size 0, --seed 0, --num-workers -1, --lr nan,
    --lr-decay-iters 0, --tensor-model-parallel-size 0, --pipeline-model-parallel-size 0, --context-parallel-size 0,
    --expert-model-parallel-size 0, --vocab-size 0, --moe-router-topk 0, --moe-layer-freq 0,
    --num-layers-per-virtual-pipeline-stage 0, --num-virtual-stages-per-pipeline-rank 0, --max-position-embeddings 0,
    --padded-vocab-size 0, --moe-router-num-groups 0
    """.split(",")


@each_row("flags", map(str.strip, OUT_OF_RANGE))
def test_numbers_unchecked_by_megatron_are_refused(flags):
    assert_refused(refusal(flags), f"value-out-of-range {flags.split()[0]}")


def test_a_value_that_is_not_understood_has_one_remedy():
    codes, sentence = refusal("--log-dir x --inject 'kil rank=0'")
    assert codes == ["value-unreadable"] and sentence.count("Fix: ") == 1 and "[" not in sentence


def _build_tokenizer(args):
    raise ValueError("no end of text")


def _set_tensorboard_writer(args):
    raise OSError("cannot be mapped")


@each_row(
    ("function", "code", "named"),
    [
        (_build_tokenizer, "tokenizer-unusable", "--tokenizer-type Some --vocab-file vocabulary ValueError"),
        (_set_tensorboard_writer, "log-writer-unusable", "TensorBoard --tensorboard-dir board OSError"),
    ],
)
def test_what_cannot_be_set_up_is_named_alone(function, code, named, capsys):
    from megatron.pretraining.entry.flags import set_global_variables  # after moc.megatron, which adapts megatron-core

    args = Namespace(tensorboard_dir="board", tokenizer_type="Some", vocab_file="vocabulary", wandb_project="")
    with pytest.raises(SystemExit) as ended:
        set_global_variables(function)(args)
    output = capsys.readouterr().err
    assert ended.value.code == 2 and only_code(output) == code and all(word in output for word in named.split())
    assert ("tokenizer" in output) == (code == "tokenizer-unusable")


def test_megatron_disabling_values_are_accepted():
    off = "--exit-interval 0 --exit-duration-in-mins 0 --train-sync-interval 0 --eval-iters -1 --loss-scale 0 --lr 0"
    config = parse(f"{off} --clip-grad -1")
    assert not duties_after(config, 4, stops=False).ends
    assert not StopRequests(config).pending


def test_save_interval_without_directory_has_no_effect():
    assert parse("--save-interval 0").checkpoint.save_interval >= parse("").checkpoint.save_interval


def test_all_invalid_numbers_are_reported_together():
    assert_refused(
        refusal("--log-interval 0 --eval-interval 0"),
        "value-out-of-range value-out-of-range --log-interval --eval-interval",
    )


@each_row(
    ("flags", "interval"),
    [
        ("--save-retain-interval 6", 6),
        ("--save-retain-interval 6 --save-interval 3", 3),
        ("--save-interval 3", 3),
        ("", 10**9),  # only at the end
    ],
)
def test_save_interval_defaults_to_retain_interval(flags, interval):
    assert parse(f"--save x {flags}").checkpoint.save_interval == interval


@each_row("flags, expected", REFUSED)
def test_invalid_options_are_refused_by_code(flags, expected):
    assert_refused(refusal(flags), expected)


def test_arguments_that_only_scripts_read_are_refused():
    arguments = parse().arguments
    arguments.per_dataset_sequences_path, arguments.check_for_spiky_loss = "sequences.json", True
    arguments.hybrid_layer_pattern = "M*M*"
    with pytest.raises(ConfigError) as found:
        check_run(arguments)
    codes = [problem.code for problem in found.value.problems]
    assert codes == ["data-kind-unsupported", *["loop-argument-unsupported"] * 2]


def test_faults_are_read_from_words_and_semicolons():
    one, other = "kill rank=1 iteration=2", "stop rank=0 iteration=3 point=loading"
    log = "--log-dir log"
    expected = ("kill ranks=1 iteration=2 point=start", "stop ranks=0 iteration=3 point=loading")
    assert parse(f'{log} --inject "{one}" "{other}"').faults.inject == expected
    config = parse(f'{log} --inject "{one}; {other}"')
    assert config.faults.inject == expected
    assert [str(fault) for fault in config.faults.planned(2, 10)] == list(expected)


def test_invalid_faults_are_refused():
    assert_refused(refusal('--log-dir log --inject "kill rank=1"'), "value-unreadable --inject")
    assert_refused(refusal('--inject "kill rank=1 iteration=2"'), "flag-needs-another --inject --log-dir")
    expected = "flag-needs-another --inject-seed --inject-mtbf-iterations"
    assert_refused(refusal("--inject-seed 3"), expected)


@each_row("from_file", [False, True])
def test_default_value_counts_as_given(from_file, tmp_path):
    options = {"transformer-impl": "transformer_engine", "moe-token-dispatcher-type": "allgather"}
    words = " ".join(f"--{name} {value}" for name, value in options.items())
    words = f"--config {write(tmp_path, options)}" if from_file else words
    assert parse(words).network.transformer_impl == "transformer_engine"
    elastic = "--elastic --elastic-slots 8 --calculate-per-token-loss --global-batch-size 4"
    assert parse(elastic).moe.moe_token_dispatcher_type == "alltoall"
    assert_refused(refusal(f"{elastic} {words}"), "elastic-excludes-flag --moe-token-dispatcher-type")


@each_row("key", ["config", "--config"])
def test_file_naming_another_file_is_refused(key, tmp_path):
    path = write(tmp_path, {key: "other.yaml"})
    assert_refused(refusal(f"--config {path}"), "flag-has-no-effect --config")
    assert parse(f"--config {write(tmp_path, {key: None})}")
