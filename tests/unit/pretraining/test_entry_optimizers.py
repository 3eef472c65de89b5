"""Optimizers of Megatron-LM that cannot work are refused by their arguments."""

from argparse import Namespace

import pytest

from megatron.pretraining.config import ConfigError
from megatron.pretraining.entry import optimizers
from megatron.pretraining.entry.stock_loop import refuse_arguments

LAYERS = dict(optimizer="muon", use_layer_wise_distributed_optimizer=True, use_layer_wise_param_layout=True, bf16=True)
BY_THEMSELVES = LAYERS | dict(use_layer_wise_param_layout=False)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """The package of Muon, also where it is not installed."""
    monkeypatch.setattr(optimizers, "find_spec", lambda name: name)


@pytest.mark.parametrize(
    "arguments",
    [
        dict(optimizer="adam", fp16=True),
        dict(optimizer="sgd"),
        dict(optimizer="muon"),
        LAYERS | dict(overlap_param_gather=True),
        LAYERS | dict(add_bias_linear=True, expert_model_parallel_size=1),
        BY_THEMSELVES | dict(add_bias_linear=True, expert_model_parallel_size=2),
    ],
)
def test_others_are_not_refused(arguments):
    refuse_arguments(Namespace(**arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        dict(optimizer="muon", fp16=True),
        dict(optimizer="adam", use_precision_aware_optimizer=True),
        dict(optimizer="adam", optimizer_cpu_offload=True),
        LAYERS | dict(bf16=False),
        LAYERS | dict(bf16=False, fp16=True),
        LAYERS | dict(add_bias_linear=True, expert_model_parallel_size=2),
        BY_THEMSELVES | dict(overlap_param_gather=True),
    ],
)
def test_each_that_cannot_work_is_refused(arguments):
    with pytest.raises(ConfigError) as caught:
        refuse_arguments(Namespace(**arguments))
    assert [one.code for one in caught.value.problems] == ["optimizer-excludes-flag"]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(optimizers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        refuse_arguments(Namespace(optimizer="lion"))
    assert [one.code for one in caught.value.problems] == ["package-missing"]
    assert "emerging-optimizers" in str(caught.value)
