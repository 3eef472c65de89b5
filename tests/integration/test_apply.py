"""An update alone, from reduced gradients that were kept, is the iteration that they are of, to the last bit."""

import pytest

from tests.integration.test_precision import BF16, FP16
from tests.integration.tiny import EXPERT_BIAS, FLAGS, LAYOUTS
from tests.worlds import run_world

SMALL = dict(num_layers=2, hidden_size=32, ffn_hidden_size=48, num_experts=4, seq_length=16, clip_grad=0.1)
WAYS = {
    "fp32 biases": ("PP2xEP2", EXPERT_BIAS),
    "bf16 replicated": ("EP2", BF16 | dict(use_distributed_optimizer=False)),
    "fp16": ("DP2", FP16),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_state_after_is_that_of_forward_backward_and_update(way, data):
    layout, flags = WAYS[way]
    size, parallel = LAYOUTS[layout]
    flags = FLAGS | SMALL | parallel | data | flags | dict(train_iters=4)
    for worker in run_world(size, "tests.integration.replay_bodies:apply_again", flags=flags):
        assert worker["applied"] == worker["computed"]
        assert worker["computed"]["digests"] != worker["before"]["digests"]
