"""The vote: one all-reduce between reduced gradients and update, and nothing counts before it."""

import pytest

from tests.integration.tiny import EXPERT_BIAS, FLAGS, LAYOUTS
from tests.worlds import run_world

# clipping that bites, and a rate from the first step on
SHARP = dict(clip_grad=0.01, lr_warmup_iters=0, train_iters=2)


def steps(layout, data, poison=None, poisoned_step=0, **flags):
    size, parallel = LAYOUTS[layout]
    flags = FLAGS | parallel | data | SHARP | flags
    return run_world(size, "tests.integration.bodies:steps", flags=flags, poison=poison, poisoned_step=poisoned_step)


OPTIMIZERS = {
    "fp32": {},
    "bf16": dict(bf16=True),
    "fp16": dict(fp16=True, initial_loss_scale=256.0),
    "fp32 replicated": dict(use_distributed_optimizer=False),
    "bf16 replicated": dict(bf16=True, use_distributed_optimizer=False),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", ["PP2xEP2", "TP2xEP2"])
def test_commit_uses_one_all_reduce_and_keeps_gradients(layout, optimizer, data):
    for worker in steps(layout, data, **OPTIMIZERS[optimizer]):
        for number, step in enumerate(worker):
            assert step["record"]["grad_norm"] > SHARP["clip_grad"]
            names = [] if number else 2 * [["all_gather_into_tensor", 4]]  # of what the loss function reports
            assert step["collectives"] == [*names, ["all_reduce", 4]]
            assert step["apply_collectives"] == []
            once_each = [] if "replicated" in optimizer else ["dist_all_gather_func"] * step["buckets"]
            assert [name for name, _ in step["gather_collectives"]] == once_each
            assert step["gradients"]["after"] == step["gradients"]["reduced"]
            assert step["weights"]["after"] != step["weights"]["before"]


@pytest.mark.parametrize("poison", ["weight", "loss"])
def test_non_finite_values_stop_all_without_update(poison, data):
    said = set()
    for (step,) in steps("PP2xEP2", data, poison, train_iters=1, **EXPERT_BIAS):
        said.add(step["refused"])
        assert step["weights"]["after"] == step["weights"]["before"]
        assert step["biases"]["after"] == step["biases"]["before"]
    (sentence,) = said
    assert "not finite; no weight has moved" in sentence


def test_non_finite_iteration_is_skipped_on_request(data):
    flags = dict(check_for_nan_in_loss_and_grad=False, train_iters=3, **EXPERT_BIAS)
    for before, poisoned, after in steps("PP2xEP2", data, "loss", poisoned_step=1, **flags):
        assert [s["record"]["skipped"] for s in (before, poisoned, after)] == [False, True, False]
        assert poisoned["weights"]["after"] == poisoned["weights"]["before"]
        assert poisoned["biases"]["after"] == poisoned["biases"]["before"]
        assert after["weights"]["after"] != after["weights"]["before"]
        assert before["biases"]["after"] != before["biases"]["before"]
        # the learning rate goes on with updates, not with iterations
        assert poisoned["record"]["learning_rate"] == after["record"]["learning_rate"]
