"""Settings of a session, from flags."""

from types import SimpleNamespace

import pytest
import torch

from megatron.pretraining.session import settings_of
from moc.policy.flags import PolicyFlags
from moc.runtime.job import Job
from tests.cases import each_row
from tests.errors import raises
from tests.unit.pretraining.flags import parse

ENGINE = SimpleNamespace(world=SimpleNamespace(size=1, device=torch.device("cpu"), job=Job()), stages=(0, 0))


def test_policy_flag_error_names_policy(monkeypatch):
    def refuses(*_):
        raise ValueError("this layout has no turns")

    config = parse("--ckpt-policy full --ckpt-dir x")
    assert settings_of(config, ENGINE).policy == "full"
    monkeypatch.setattr(PolicyFlags, "settings", refuses)
    with raises("policy-flags-conflict", "--ckpt-policy full"):
        settings_of(config, ENGINE)


@each_row(("device", "chunks", "share"), [("cpu", 1, 1 / 9), ("cpu", 2, 1 / 17), ("cuda", 1, 0.0)])
def test_bubbles_are_estimated_and_unused_on_cuda(device, chunks, share):
    flags = "--ckpt-policy selective --selective-hide bubble --ckpt-dir x --pipeline-model-parallel-size 2"
    virtual = f"--num-virtual-stages-per-pipeline-rank {chunks}" if chunks > 1 else ""
    config = parse(f"{flags} {virtual} --global-batch-size 16")  # 8 micro batches
    engine = SimpleNamespace(world=SimpleNamespace(size=2, device=torch.device(device), job=Job()), stages=(0, 0, 1, 1))
    options = settings_of(config, engine).options
    assert (options["hide"], options["bubble_share"]) == ("bubble", pytest.approx(share))


def test_boost_is_set_only_if_experts_drop_tokens():
    def boost(flags):
        return settings_of(parse(f"--ckpt-policy selective --ckpt-dir x {flags}"), ENGINE).options["boost"]

    padded = "--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity"
    assert boost("--moe-expert-capacity-factor 1") == 0.1
    assert boost("") == boost(padded) == boost(f"{padded} --selective-boost 0") == 0.0
