"""The model FLOPs utilization, by the peak of the devices."""

import pytest
import torch

from megatron.pretraining.process import cpu
from moc.state.record import StepRecord
from tests.replicas import replicas_world

cpu.install()

from megatron.pretraining.entry import log  # noqa: E402
from megatron.pretraining.entry.log import peak_flops, peak_of_name  # noqa: E402


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("Tesla V100-SXM2-32GB", 125),
        ("another card", None),
    ],
)
def test_peak_flops_follow_device_name(name, tflops):
    assert peak_of_name(name) == (tflops and tflops * 1e12)


def test_cpu_has_no_peak_flops():
    assert peak_flops(100.0, torch.device("cpu")) is None


def test_mfu_is_model_flops_by_peak_of_all_devices(monkeypatch):
    monkeypatch.setattr(log, "get_args", lambda: None)
    monkeypatch.setattr(log.training, "num_floating_point_operations", lambda args, samples: 1e12 * samples)
    stock = object.__new__(log.StockLog)
    stock._peak_flops, stock._world = 100e12, replicas_world(0, 4)
    record = StepRecord(1, 2.0, 1.0, 1.0, False, 64, 1e-3, samples=8)
    assert stock._measure(record, elapsed=0.05) == {"mfu": pytest.approx(8 / (0.05 * 100 * 4))}
    assert stock._measure(record, elapsed=0.0) == {}  # reported for another worker
    stock._peak_flops = None
    assert stock._measure(record, elapsed=0.05) == {}
