"""Codes of flags of training, which the warm process of ``mocrun`` checks before it forks workers."""

from __future__ import annotations

from pathlib import Path

from tests.codes.case import PROGRAM, Case, writes
from tests.unit.pretraining.flags import BASE, without

ELASTIC = "--elastic --elastic-slots 4 --calculate-per-token-loss --global-batch-size 8"
ELASTIC8 = ELASTIC.replace("slots 4", "slots 8")
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
    "flag-unknown": flags("--hiden-size 64", named="--hidden-size"),
    "value-without-flag": flags("word", named="word"),
    "value-not-taken": flags("--bf16=true"),
    "value-missing": flags("--train-iters"),
    "value-unreadable": flags("--train-iters ten"),
    "value-out-of-range": snapshots("full", "--ckpt-keep 0"),
    "value-not-a-choice": flags("--optimizer lamb"),
    "config-file-unreadable": flags("--config /no/such.yaml"),
    "flags-exclude-each-other": flags("--initialization exact --init-model-with-meta-device"),
    "flag-needs-another": flags("--inject 'kill rank=0 iteration=2'", named="--log-dir"),
    "flag-has-no-effect": flags("--max-snapshot-lag 1"),
    "flag-exceeds-another": flags(f"{ELASTIC} --elastic-everywhere 5", named="--elastic-everywhere"),
    "flag-not-a-multiple": snapshots(
        "full",
        "--ckpt-tier memory --snapshot-interval 3 --persist-interval 4",
        named="--persist-interval",
    ),
    "upstream-logging-unsupported": snapshots("sparse", "--upstream-logging"),
    "grad-norm-unsupported": flags("--grad-norm stock --deepspeed"),
    "initialization-unsupported": flags(f"--initialization stock {ELASTIC8}", workers=2, named="--initialization"),
    "optimizer-excludes-flag": flags("--optimizer sgd --exp-avg-dtype fp8"),
    "batch-not-divisible": flags(
        "--deepspeed --gradient-accumulation-steps 3 --global-batch-size 4", named="--gradient-accumulation-steps"
    ),
    "elastic-needs-flag": flags("--elastic --elastic-slots 4", named="--calculate-per-token-loss"),
    "elastic-excludes-flag": flags(f"{ELASTIC} --moe-grouped-gemm"),
    "elastic-under-torchrun": flags(ELASTIC8, workers=2, variables={"TORCHELASTIC_RUN_ID": "x"}, named="--elastic"),
    "slots-too-few": flags(f"{ELASTIC} --elastic-slots 2", workers=2, named="--elastic-slots"),
    "nodes-too-few": flags(f"{ELASTIC} --elastic-min-replicas 3", workers=2, named="--elastic-min-replicas"),
    "snapshot-directory-missing": flags("--ckpt-policy full"),
    "snapshot-interval-fixed": snapshots("sparse", "--snapshot-interval 5"),
    "policy-lacks-flag": snapshots("full", "--pec-k 2"),
    "flag-chosen-by-auto": snapshots("auto", "--pec-k 2"),
    "tier-lacks-flag": snapshots("full", "--persist-interval 2"),
    "gradients-need-memory": snapshots("selective", "--selective-gradients on"),
    "gradients-need-adam": snapshots(
        "selective", "--selective-gradients on --ckpt-tier memory --snapshot-interval 1 --optimizer sgd"
    ),
    "bucket-size-odd": flags("--deepspeed --zero-allgather-bucket-size 3", named="--zero-allgather-bucket-size"),
    "zero-stage-unsupported": flags("--deepspeed --zero-stage 3", named="--zero-stage"),
    "deepspeed-excludes-flag": flags("--deepspeed --use-distributed-optimizer"),
    "deepspeed-version-unsupported": flags("--deepspeed", named="0.1.0", make=package("deepspeed", "0.1.0"), cold=True),
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
    "fault-without-target": flags("--inject 'kill rank=9 iteration=2' --log-dir log"),
}
