"""The peak of a device, by which the MFU is computed."""

import pytest
import torch

from megatron.pretraining.process import cpu

cpu.install()

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
def test_peak_by_name(name, tflops):
    assert peak_of_name(name) == (tflops and tflops * 1e12)


def test_a_cpu_has_no_peak():
    assert peak_flops(100.0, torch.device("cpu")) is None
