"""Who stops and resumes in the same layout has never stopped, to the last bit."""

import pytest

from tests.integration.test_determinism import DROPOUT
from tests.integration.test_precision import BF16, FP16
from tests.integration.tiny import EXPERT_BIAS, known, train

REPLICATED = dict(use_distributed_optimizer=False)
RUNS = {
    "fp32, saved asynchronously": ("PP2xEP2", dict(async_save=True)),
    "fp32 replicated": ("PP2", REPLICATED),
    "bf16 replicated, saved asynchronously": ("EP2", BF16 | REPLICATED | dict(async_save=True)),
    "fp16": ("PP2", FP16),
    "moments in 8 and 16 bits": ("EP2", BF16 | dict(exp_avg_dtype="fp8", exp_avg_sq_dtype="fp16")),
    "expert bias, tied embeddings": ("PP2", BF16 | EXPERT_BIAS | dict(untie_embeddings_and_output_weights=False)),
    "bf16, biases": ("TP2xEP2", BF16 | dict(add_bias_linear=True, swiglu=False)),
    "SGD": ("EP2", BF16 | REPLICATED | dict(optimizer="sgd", lr=0.1)),
    "weight decay that grows": (
        "1", dict(weight_decay_incr_style="cosine", start_weight_decay=0.01, end_weight_decay=0.2)
    ),
    "reader processes": ("DP2", dict(num_workers=1)),
}  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
def test_resume_is_bit_identical(run, data, tmp_path):
    layout, flags = RUNS[run]
    flags = {**data, **DROPOUT, **flags, "train_iters": 4}
    straight = train(layout, flags | dict(save=str(tmp_path), save_interval=2))
    resumed = train(layout, flags | dict(load=str(tmp_path), ckpt_step=2, async_save=False))
    assert resumed.start == 2
    assert resumed.records == straight.records[2:]
    assert resumed.samples == {i: straight.samples[i] for i in (2, 3)}
    assert resumed.weights == straight.weights


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "async"])
def test_stopping_and_saving_do_not_change_training(asynchronous, data, tmp_path):
    flags = data | DROPOUT | BF16
    straight = known("EP2", flags)
    saving = flags | dict(save=str(tmp_path), save_interval=1, async_save=asynchronous)
    first = train("EP2", saving | dict(exit_interval=4))
    second = train("EP2", saving | dict(load=str(tmp_path)))
    assert first.records + second.records == straight.records
    assert second.weights == straight.weights


def test_skipped_iterations_resume(data, tmp_path):
    flags = data | dict(fp16=True, initial_loss_scale=2.0**40, hysteresis=2, train_iters=8)
    straight = train("1", flags)
    train("1", flags | dict(save=str(tmp_path), exit_interval=3))
    second = train("1", flags | dict(load=str(tmp_path)))
    assert second.records == straight.records[3:]
    assert [r["loss_scale"] for r in second.records][:2] == [2.0**38, 2.0**37]


RATE = dict(lr_decay_style="WSD", lr_wsd_decay_iters=3, lr_decay_iters=6, lr_warmup_iters=3)
SCHEDULE = RATE | dict(weight_decay_incr_style="cosine", start_weight_decay=0.1, end_weight_decay=0.9)
OTHER = {
    "peak and final rate": dict(lr=3e-2, min_lr=1e-3),
    "start of the warm-up": dict(lr_warmup_init=1e-3, lr_warmup_iters=4),
    "last phase": dict(lr_wsd_decay_iters=2, lr_wsd_decay_style="linear"),
    "weight decay": dict(start_weight_decay=0.0, end_weight_decay=0.0),
    "another style": dict(lr_decay_style="constant", lr_wsd_decay_iters=None),
}


@pytest.fixture(scope="module")
def scheduled(data, tmp_path_factory):
    saved = tmp_path_factory.mktemp("scheduled")
    return saved, train("1", data | SCHEDULE | dict(save=str(saved), save_interval=2))


@pytest.mark.parametrize("other", OTHER)
def test_resume_uses_schedule_of_checkpoint_if_requested(other, scheduled, data):
    saved, straight = scheduled
    flags = data | SCHEDULE | OTHER[other] | dict(load=str(saved), ckpt_step=2)
    resumed = train("1", flags | dict(use_checkpoint_opt_param_scheduler=True))
    assert resumed.records == straight.records[2:]
    assert resumed.weights == straight.weights


@pytest.mark.parametrize("engine", ["megatron-core", "DeepSpeed"])
def test_resume_uses_schedule_of_snapshot_if_requested(engine, data, tmp_path):
    flags = data | SCHEDULE | dict(ckpt_dir=str(tmp_path), ckpt_policy="full", snapshot_interval="2", ckpt_keep=9)
    if engine == "DeepSpeed":
        flags |= dict(deepspeed=True, zero_stage=1, use_distributed_optimizer=False)
    straight = train("DP2", flags)
    changed = dict(OTHER["peak and final rate"] | OTHER["weight decay"], ckpt_step=2)
    resumed = train("DP2", flags | changed | dict(use_checkpoint_opt_param_scheduler=True))
    assert resumed.records == straight.records[2:]
    assert resumed.weights == straight.weights


def test_resume_uses_schedule_of_flags_if_requested(scheduled, data):
    saved, straight = scheduled
    later = data | SCHEDULE | OTHER["peak and final rate"] | OTHER["weight decay"] | dict(train_iters=6)
    whole = train("1", later)
    resumed = train("1", later | dict(load=str(saved), ckpt_step=2, override_opt_param_scheduler=True))
    rates = [[record["learning_rate"] for record in run.records] for run in (whole, resumed)]
    assert rates[0][2:] == rates[1]
    assert resumed.weights != straight.weights
