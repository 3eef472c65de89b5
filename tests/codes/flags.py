"""Codes of flags of training, which ``mocrun`` checks before it starts workers."""

from __future__ import annotations

from pathlib import Path

from tests.codes.case import PROGRAM, Case, writes
from tests.unit.pretraining.flags import BASE, PP2, TP2, without

ELASTIC = "--elastic --elastic-slots 4 --calculate-per-token-loss --global-batch-size 8"
DEEPSPEED = "--deepspeed --deepspeed-config ds.json"


def flags(words: str, *, drop: str = "", workers: int = 1, launcher: str = "", **more) -> Case:
    """A command line of training whose flags cannot work; ``drop`` is left out of the valid flags."""
    named = next((word.partition("=")[0] for word in words.split() if word.startswith("--")), drop)
    base = without(drop) if drop else BASE
    options = {"named": named} | more
    return Case("mocrun", f"--nproc-per-node {workers} {launcher} {PROGRAM} {base} {words}", 2, **options)


def snapshots(policy: str, words: str = "", **more) -> Case:
    """A command line with snapshots."""
    named = next((word for word in words.split() if word.startswith("--")), "--ckpt-policy")
    return flags(f"--ckpt-policy {policy} --ckpt-dir x {words}", **{"named": named} | more)


def ds_config(text: str, words: str = "", **more) -> Case:
    """A command line with this ds_config."""
    return flags(f"{DEEPSPEED} {words}", **{"named": "ds.json", "make": writes(ds__json=text)} | more)


def config(text: str, named: str) -> Case:
    """A command line with this file of flags."""
    return flags("--config file.yaml", named=named, make=writes(file__yaml=text))


def package(name: str, version: str):
    """Writes an installed package without contents."""

    def make(root: Path) -> None:
        described = root / f"{name}-{version}.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (root / name).mkdir()
        (root / name / "__init__.py").write_text(f"__version__ = {version!r}\n")

    return make


CASES = {
    # the command line
    "flag-unknown": flags("--hiden-size 64", named="--hidden-size"),
    "flag-missing": flags("", drop="--lr"),
    "flag-unsupported": flags("--context-parallel-size 2"),
    "value-without-flag": flags("word", named="word"),
    "value-not-taken": flags("--bf16=true"),
    "value-missing": flags("--train-iters"),
    "value-unreadable": flags("--train-iters ten"),
    "value-out-of-range": flags("--train-iters 0"),
    "value-not-a-choice": flags("--optimizer lamb"),
    "preset-unknown": flags("--model gpt-5"),
    # files of flags
    "config-file-unreadable": flags("--config /no/such.yaml"),
    "config-key-misplaced": config("training:\n  num_layers: 4\n", "num_layers"),
    "config-key-repeated": config("lr: 0.1\nlearning:\n  lr: 0.1\n--lr: 0.1\n", "lr"),
    # combinations
    "flags-exclude-each-other": flags("--fp16 --bf16"),
    "flag-needs-another": flags("--save-interval 5"),
    "flag-has-no-effect": flags("--num-query-groups 2"),
    "flag-exceeds-another": flags("--min-lr 1"),
    "flag-not-a-multiple": flags("--num-attention-heads 3"),
    "sequence-too-long": flags("--max-position-embeddings 8"),
    "layer-pattern-mismatch": flags("--moe-layer-freq [0]*4"),
    "layers-not-divisible": flags(
        f"{PP2} --num-layers 6 --num-layers-per-virtual-pipeline-stage 2", workers=2, named="--num-layers"
    ),
    "recompute-flags-incomplete": flags("--recompute-granularity full"),
    "warmup-too-long": flags("--lr-warmup-iters 10"),
    "weight-decay-style-conflict": flags("--weight-decay-incr-style linear"),
    "training-length-missing": flags("", drop="--train-iters"),
    "training-length-unit-differs": flags("--lr-decay-samples 9"),
    "pipeline-needs-flag": flags(
        f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
        workers=2,
        named="--overlap-p2p-communication",
    ),
    "pipeline-excludes-flag": flags("--reset-attention-mask --pipeline-model-parallel-size 4", workers=4),
    "upstream-logging-unsupported": snapshots("sparse", "--upstream-logging"),
    "grad-norm-unsupported": flags(f"--grad-norm stock {ELASTIC}"),
    "initialization-unsupported": flags(f"--initialization stock {ELASTIC}"),
    # experts
    "capacity-balancing-conflict": flags("--moe-expert-capacity-factor 1 --moe-router-load-balancing-type sinkhorn"),
    "router-groups-too-small": flags("--moe-router-num-groups 8 --moe-router-group-topk 1", named="--moe-router-topk"),
    "router-without-gradient": flags("--moe-router-topk 1"),
    "expert-biases-unsupported": flags("--moe-shared-expert-intermediate-size 64"),
    "expert-split-unsupported": flags(TP2, workers=2, named="--expert-tensor-parallel-size"),
    "experts-need-flag": flags("--tensor-model-parallel-size 2", workers=2, named="--sequence-parallel"),
    # precision, packages
    "precision-needs-flag": flags("--fp8-format e4m3"),
    "fp8-recipe-unsupported": flags("--fp8-format hybrid --bf16 --fp8-recipe delayed", named="--fp8-recipe"),
    "fp8-excludes-flag": flags("--fp8-format e4m3 --bf16 --moe-grouped-gemm --transformer-impl local"),
    "optimizer-excludes-flag": flags("--optimizer sgd --exp-avg-dtype fp8"),
    "package-missing": flags("--moe-token-dispatcher-type flex --expert-model-parallel-size 2", workers=2),
    # data and tokenizers
    "data-source-missing": flags("", drop="--mock-data", named="--data-path"),
    "data-file-missing": flags("--data-path /no/such", drop="--mock-data", named="/no/such"),
    "data-path-malformed": flags("--data-path 1 a b c", drop="--mock-data", named="1 a b c"),
    "split-malformed": flags("--split 9,x"),
    "samples-too-few": flags("--train-samples 1", drop="--train-iters", named="--train-samples"),
    "tokenizer-incomplete": flags("--tokenizer-type SentencePieceTokenizer"),
    "tokenizer-missing": flags(
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model /no/such.model", named="/no/such.model"
    ),
    "tokenizer-not-pinned": flags(
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model org/name", named="--tokenizer-revision"
    ),
    # workers
    "workers-not-divisible": flags("--pipeline-model-parallel-size 2", workers=3),
    "batch-not-divisible": flags("--global-batch-size 6", workers=2),
    "fault-without-target": flags("--inject 'kill rank=9 iteration=2' --log-dir log"),
    # elastic training
    "elastic-needs-flag": flags("--elastic --elastic-slots 4", named="--calculate-per-token-loss"),
    "elastic-excludes-flag": flags(f"{ELASTIC} --moe-grouped-gemm"),
    "elastic-domain-too-small": flags(
        f"{ELASTIC} --elastic-domain 1", workers=2, launcher="--nnodes 2 --rdzv-endpoint a:1", named="--elastic-domain"
    ),
    "elastic-under-torchrun": flags(ELASTIC, workers=2, variables={"TORCHELASTIC_RUN_ID": "x"}),
    "slots-too-few": flags(f"{ELASTIC} --elastic-slots 2", workers=2, named="--elastic-slots"),
    "nodes-too-few": flags(f"{ELASTIC} --elastic-min-replicas 3", workers=2, named="--elastic-min-replicas"),
    # snapshots
    "snapshot-directory-missing": flags("--ckpt-policy full"),
    "snapshot-interval-fixed": snapshots("sparse", "--snapshot-interval 5"),
    "policy-lacks-flag": snapshots("full", "--pec-k 2"),
    "flag-chosen-by-auto": snapshots("auto", "--pec-k 2"),
    "tier-lacks-flag": snapshots("full", "--persist-interval 2"),
    "gradients-need-memory": snapshots("selective", "--selective-gradients on"),
    "gradients-need-adam": snapshots(
        "selective", "--selective-gradients on --ckpt-tier memory --snapshot-interval 1 --optimizer sgd"
    ),
    "gradients-need-separate-experts": snapshots(
        "selective", "--selective-gradients on --ckpt-tier memory --moe-grouped-gemm --disable-bias-linear"
    ),
    # DeepSpeed
    "bucket-size-odd": flags("--deepspeed --zero-allgather-bucket-size 3", named="--zero-allgather-bucket-size"),
    "zero-stage-unsupported": flags("--deepspeed --zero-stage 3", named="--zero-stage"),
    "deepspeed-excludes-flag": flags("--deepspeed --use-distributed-optimizer"),
    "deepspeed-version-unsupported": flags("--deepspeed", named="0.1.0", make=package("deepspeed", "0.1.0")),
    "ds-config-unreadable": ds_config("{"),
    "ds-config-key-unsupported": ds_config('{"tomorrow": 1}', named="tomorrow"),
    "ds-config-value-unsupported": ds_config('{"optimizer": {"type": "Lamb"}}', named="Lamb"),
    "ds-config-value-invalid": ds_config(
        '{"optimizer": {"type": "AdamW", "params": {"betas": 0.9}}}', named="optimizer.params.betas"
    ),
    "ds-config-contradicts-itself": ds_config(
        '{"train_batch_size": 1, "train_batch_size": 2}', named="train_batch_size"
    ),
    "ds-config-contradicts-flag": ds_config('{"gradient_clipping": 0.5}', "--clip-grad 2", named="--clip-grad"),
}
