"""Shares of a live model: together every element once, as even as the rules promise, and as large as was predicted."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from megatron.pretraining.planning.model import meta_operators
from moc.sharding import (
    SCHEMES,
    ParallelLayout,
    StateBytes,
    assign_items,
    bytes_by_rank,
    cut_large_items,
    list_save_items,
)
from moc.state.operators import operator_of
from moc.store.shard_file import ShardReader
from tests.cases import each_row
from tests.configs import config_of
from tests.integration.test_training_state import covered, whole
from tests.integration.tiny import DEEP, EXPERT_BIAS, FLAGS, LAYOUTS
from tests.worlds import REPOSITORY, run_world

SMALL = DEEP | dict(num_experts=8, lr_warmup_iters=0)
ZERO, REPLICATED = dict(use_distributed_optimizer=True), dict(use_distributed_optimizer=False)
BF16, TIED = dict(bf16=True), dict(untie_embeddings_and_output_weights=False)

WORLDS = {
    "DP4": ("DP4", REPLICATED | EXPERT_BIAS),
    "DP4 ZeRO": ("DP4", ZERO | BF16),
    "PP2xEP2": ("PP2xEP2", REPLICATED | TIED | BF16),
    "PP2xEP2 ZeRO": ("PP2xEP2", ZERO | TIED | EXPERT_BIAS),
    "TP2xEP2": ("TP2xEP2", REPLICATED),
    "TP2xEP2 ZeRO": ("TP2xEP2", ZERO | BF16 | EXPERT_BIAS),
    "EP4": ("EP4", REPLICATED | BF16),
    "EP4 ZeRO": ("EP4", ZERO),
}
SHARED_OUT = ["EE+AN", "baseline", "adaptive,equal"]


@pytest.fixture(scope="module")
def shared(data, tmp_path_factory):
    """Runs a world once for each name; where it saved, and what its workers told."""
    done = {}

    def once(name: str):
        if name not in done:
            directory, (layout, flags) = tmp_path_factory.mktemp("shares"), WORLDS[name]
            size, parallel = LAYOUTS[layout]
            body = "tests.integration.share_bodies:share_out"
            flags = FLAGS | SMALL | parallel | data | flags
            done[name] = (
                directory,
                run_world(size, body, flags=flags, schemes=SHARED_OUT, directory=str(directory)),
            )
        return done[name]

    return once


@pytest.mark.parametrize("name", WORLDS)
@each_row("plan", ["full", "compute", "mixed"])
def test_shards_contain_each_element_once_with_its_value(name, plan, shared):
    directory, workers = shared(name)
    for scheme in SHARED_OUT:
        counts = covered(worker[plan][scheme]["boxes"] for worker in workers)
        assert counts and all((count == 1).all() for count in counts.values())
    first, here = (ShardReader(sorted((directory / d).glob("*.safetensors"))) for d in ("first", plan))
    for slot, tensor in counts:
        assert torch.equal(whole(first, tensor, slot), whole(here, tensor, slot)), (slot, tensor)
    assert set(counts) == wanted(first, plan)


def wanted(first: ShardReader, plan: str) -> set[tuple[str, str]]:
    """What the plan asks for, of all slots of all tensors."""
    everything = {(source.box.slot, source.box.name) for source in first.sources()}
    operators = sorted({operator_of(tensor) for _, tensor in everything})
    full = {name: plan == "full" or plan == "mixed" and not number % 2 for number, name in enumerate(operators)}
    return {(slot, tensor) for slot, tensor in everything
            if full[operator_of(tensor)] == (slot != "param") or tensor.endswith("expert_bias")}  # fmt: skip


def saved(workers: list[dict], plan: str, scheme: str) -> list[int]:
    """Bytes by rank."""
    return [worker[plan][scheme]["bytes"] for worker in workers]


@each_row("name", WORLDS)
def test_largest_shard_is_predicted_before_saving(name, shared):
    workers = shared(name)[1]
    for plan in ("full", "compute", "mixed"):
        for scheme in SHARED_OUT:
            told = max(worker[plan][scheme]["most"] for worker in workers)
            assert abs(told - max(saved(workers, plan, scheme))) < 12  # a cut moves to where an element begins


def test_replicas_split_state_or_first_replica_saves_it(shared):
    for plan in ("full", "compute", "mixed"):
        evenly, at_first = (saved(shared("DP4")[1], plan, scheme) for scheme in ("EE+AN", "baseline"))
        assert sum(evenly) == sum(at_first)
        assert max(evenly) <= 1.1 * sum(evenly) / 4
        assert at_first[1:] == [0, 0, 0]


@each_row("name", WORLDS)
@each_row("plan", ["full", "compute"])
@each_row("scheme", ["EE+AN", "baseline"])
def test_shard_sizes_match_prediction(name, plan, scheme, shared):
    """To the byte, but where the prediction leaves something out.

    It leaves out the biases of routers, and it has another order in ZeRO's buffers, no gaps in them, and with tensor
    parallelism a choice who saves the slices of norms, which are the first copy's here.
    """
    here, there = saved(shared(name)[1], plan, scheme), predicted(name, plan, scheme)
    flags = WORLDS[name][1]
    has_biases, has_slices = flags.items() >= EXPERT_BIAS.items(), flags.items() >= ZERO.items()
    assert sum(here) == sum(there) + (SMALL["num_layers"] * SMALL["num_experts"] * 4 if has_biases else 0)
    if has_biases or has_slices:
        assert max(abs(a - b) for a, b in zip(here, there, strict=True)) <= max(there) // 50
    else:
        assert here == there


def predicted(name: str, plan: str, scheme: str) -> list[int]:
    """Bytes by rank, from flags alone."""
    layout, flags = WORLDS[name]
    size, parallel = LAYOUTS[layout]
    config = config_of(FLAGS | SMALL | parallel | dict(mock_data=True) | flags, size)
    sizes = config.parallel
    ranks = ParallelLayout(
        world=size,
        tp=sizes.tensor_model_parallel_size,
        pp=sizes.pipeline_model_parallel_size,
        ep=sizes.expert_model_parallel_size,
        expert_tp=sizes.expert_tensor_parallel_size,
    )
    weights = 2 if flags.get("bf16") else 4
    zero = flags["use_distributed_optimizer"]
    compute = StateBytes(0, weights, 0) if zero else StateBytes(weights, 0, 0)  # it is saved as the masters are
    state = StateBytes(0, 4, 8) if plan == "full" else compute
    items = cut_large_items(
        list_save_items(meta_operators(config, None, FLAGS["vocab_size"]), ranks, state, uses_zero=zero)
    )
    return bytes_by_rank(items, assign_items(items, SCHEMES[scheme]), size)


def test_documented_custom_rule_splits_trained_state(tmp_path):
    """The example of docs/how-to/own-sharding-rule.md, word by word, in a copy of the project."""
    text = (REPOSITORY / "docs" / "how-to" / "own-sharding-rule.md").read_text(encoding="utf-8")
    for name in ("moc", "megatron", "tests"):
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pretrain_gpt_moe.py", tmp_path)
    (tmp_path / "moc/sharding/rules/rotating.py").write_text(text.split("```python\n")[1].split("```")[0])
    size, parallel = LAYOUTS["DP4"]
    flags = FLAGS | SMALL | parallel | REPLICATED | dict(mock_data=True)
    arguments = dict(flags=flags, schemes=["rotating,adaptive", "baseline"], directory=str(tmp_path))
    program = f"""
import json
from tests.worlds import REPOSITORY, run_world
print(json.dumps(run_world({size}, "tests.integration.share_bodies:share_out", **{arguments!r})))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    workers = json.loads(done.stdout)
    for rank, worker in enumerate(workers):
        boxes = worker["full"]["rotating,adaptive"]["boxes"]
        experts = {operator_of(name).split(".")[-1] for _, name, *_ in boxes if ".experts." in name}
        assert experts == {str(rank), str(rank + 4)}  # of 8 in each layer, in turn
    shared_out = saved(workers, "full", "rotating,adaptive")
    assert sum(shared_out) == sum(saved(workers, "full", "baseline")) and max(shared_out) <= 1.1 * sum(shared_out) / 4
