"""An update alone, from reduced gradients that were kept, is the iteration that they are of, to the last bit."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from moc.state.operators import Detail
from tests.integration.test_precision import BF16, FP16
from tests.integration.tiny import EXPERT_BIAS, FLAGS, LAYOUTS
from tests.worlds import REPOSITORY, run_world

SMALL = dict(num_layers=2, hidden_size=32, ffn_hidden_size=48, num_experts=4, seq_length=16, clip_grad=0.1)
WAYS = {
    "fp32 biases": ("PP2xEP2", EXPERT_BIAS),
    "bf16 replicated": ("EP2", BF16 | dict(use_distributed_optimizer=False)),
    "fp16": ("DP2", FP16),
}


@pytest.mark.parametrize("way", WAYS)
def test_applied_gradients_match_computed_iteration(way, data):
    layout, flags = WAYS[way]
    size, parallel = LAYOUTS[layout]
    flags = FLAGS | SMALL | parallel | data | flags | dict(train_iters=4)
    for worker in run_world(size, "tests.integration.replay_bodies:apply_again", flags=flags):
        assert worker["applied"] == worker["computed"]
        assert worker["computed"]["digests"] != worker["before"]["digests"]
        for name, digest in worker["alone"]["digests"].items():
            assert digest == worker["computed" if ".experts.experts.0." in name else "before"]["digests"][name], name


@pytest.fixture
def alone():
    """A world of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield SimpleNamespace(rank=0, size=1)
    dist.destroy_process_group()


def test_example_engine_applies_gradients_identically(alone):
    spec = importlib.util.spec_from_file_location("pure_torch", REPOSITORY / "examples" / "pure_torch.py")
    spec.loader.exec_module(example := importlib.util.module_from_spec(spec))
    computing, applying = engines = example.Engine(alone), example.Engine(alone)
    operators = computing.state.operators()
    for iteration in range(3):
        computing.gradients(iteration)
        kept = {one.name: one.view.clone() for one in computing.state.fragments(operators, Detail.GRAD)}
        computing.apply(None)
        applying.apply(None, lambda fragment, kept=kept: kept[fragment.name])
    states = (engine.state.fragments(operators, Detail.FULL) for engine in engines)
    assert all(torch.equal(one.view, other.view) for one, other in zip(*states, strict=True))
