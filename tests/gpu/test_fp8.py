"""Products in 8 bits on a GPU: those of the CPU, up to the order of sums."""

from megatron.pretraining.process import cpu

cpu.install()

import pytest  # noqa: E402
import torch  # noqa: E402

from megatron.pretraining.entry import formats  # noqa: E402


@pytest.mark.parametrize("fp8_format", ["e4m3", "hybrid"])
@pytest.mark.parametrize("rows", [(64, 2), (7, 1), (0,)])
def test_linear_layer_matches_cpu(rows, fp8_format):
    if torch.cuda.get_device_capability() < formats.CAPABILITY:
        pytest.skip("this GPU does not multiply in 8 bits")
    found = []
    for device in ("cpu", "cuda"):
        inputs, weight, gradient = (
            torch.randn(*size, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)
            for seed, size in enumerate([(*rows, 64), (96, 64), (*rows, 96)])
        )
        outputs = formats.linear(inputs.requires_grad_(), weight.requires_grad_(), fp8_format=fp8_format)
        gradients = torch.autograd.grad(outputs, (inputs, weight), gradient)
        found.append([tensor.cpu() for tensor in (outputs.detach(), *gradients)])
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(here, there, rtol=2e-2, atol=2e-2)
