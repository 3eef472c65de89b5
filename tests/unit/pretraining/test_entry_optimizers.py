"""Optimizers of Megatron-LM that cannot work are refused by their arguments."""

import ast
import importlib.util
import math
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron.pretraining.config import ConfigError
from megatron.pretraining.entry import optimizers
from megatron.pretraining.entry.stock_loop import refuse_arguments
from tests.cases import each_row

LAYERS = dict(optimizer="muon", use_layer_wise_distributed_optimizer=True, use_layer_wise_param_layout=True, bf16=True)
BY_THEMSELVES = LAYERS | dict(use_layer_wise_param_layout=False)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """The package of Muon, also where it is not installed."""
    monkeypatch.setattr(optimizers, "find_spec", lambda name: name)


@each_row(
    "arguments",
    [
        dict(optimizer="adam", fp16=True),
        dict(optimizer="adam", use_precision_aware_optimizer=True, optimizer_cpu_offload=True),
        dict(optimizer="sgd"),
        dict(optimizer="muon"),
        dict(optimizer="muon", ckpt_format="torch"),
        LAYERS | dict(ckpt_format="torch_dist"),
        LAYERS | dict(overlap_param_gather=True),
        LAYERS | dict(add_bias_linear=True, expert_model_parallel_size=1),
        BY_THEMSELVES | dict(add_bias_linear=True, expert_model_parallel_size=2),
    ],
)
def test_supported_optimizers_are_accepted(arguments):
    refuse_arguments(Namespace(**arguments))


@each_row(
    "arguments",
    [
        dict(optimizer="muon", fp16=True),
        dict(optimizer="adam", use_precision_aware_optimizer=True),
        dict(optimizer="adam", mtp_detach_heads=True),
        LAYERS | dict(bf16=False),
        LAYERS | dict(ckpt_format="torch"),
        LAYERS | dict(bf16=False, fp16=True),
        LAYERS | dict(add_bias_linear=True, expert_model_parallel_size=2),
        BY_THEMSELVES | dict(overlap_param_gather=True),
    ],
)
def test_unsupported_optimizers_are_refused(arguments):
    with pytest.raises(ConfigError) as caught:
        refuse_arguments(Namespace(**arguments))
    assert [one.code for one in caught.value.problems] == ["optimizer-excludes-flag"]


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(optimizers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        refuse_arguments(Namespace(optimizer="lion"))
    assert [one.code for one in caught.value.problems] == ["package-missing"]
    assert "emerging-optimizers" in str(caught.value)


def built(group: str | None = None, threshold: float = math.inf):
    model = torch.nn.Linear(1, 1)
    if group:
        model.bias.grad_norm_group = group
    return Namespace(chained_optimizers=[Namespace(config=Namespace(grad_norm_skip_threshold=threshold))]), [model]


def test_update_depending_on_other_norms_is_refused():
    optimizers.refuse_built(*built())
    for mistaken in (built(group="mtp"), built(threshold=10.0)):
        with pytest.raises(ConfigError) as caught:
            optimizers.refuse_built(*mistaken)
        assert [one.code for one in caught.value.problems] == ["optimizer-unsupported"]


KNOWN = {
    "clip_grad": "the vote's norm",
    "log_num_zeros_in_grad": "the vote's number of zeros",
    "grad_norm_skip_threshold": "refused",
    "use_precision_aware_optimizer": "the norm's gradients, by megatron-core's own function",
    "use_precision_aware_optimizer_no_fp8_or_ds_fp8": "the attribute of the gradients that are scaled",
    "timers": "of its phases, which our update does not have",
    "barrier_with_L1_time": "of the same timers",
}
"""What the update of megatron-core reads of its configuration, and where that is in our update."""


def test_update_reads_only_known_options():
    """``CommitOptimizer`` takes the place of these methods."""
    core = Path(importlib.util.find_spec("megatron.core.optimizer").origin).parent
    read = set()
    for file in ("optimizer.py", "layer_wise_optimizer.py"):
        for node in ast.walk(ast.parse((core / file).read_text())):
            if isinstance(node, ast.FunctionDef) and node.name in ("step", "clip_grad_norm", "count_zeros"):
                read |= {
                    one.attr
                    for one in ast.walk(node)
                    if isinstance(one, ast.Attribute)
                    and isinstance(one.value, ast.Attribute)
                    and one.value.attr == "config"
                }
    assert read == KNOWN.keys()
