"""Linear layers that multiply in 8 bits: what they compute, and what they leave out when they are frozen."""

from megatron.pretraining.process import cpu

cpu.install()

from collections import Counter  # noqa: E402

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from megatron.pretraining.entry import formats  # noqa: E402
from tests.cases import each_row  # noqa: E402

PRODUCT = torch.ops.aten._scaled_mm.default
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def values(*size, seed=0, dtype=torch.bfloat16, scale=1.0):
    return (scale * torch.randn(*size, generator=torch.Generator().manual_seed(seed))).to(dtype)


def rounded(tensor, dtype=torch.float8_e4m3fn):
    scale = tensor.abs().max().float() / LARGEST[dtype]
    return (tensor.float() / scale).to(dtype).float() * scale


def ran(inputs, weight, outputs_gradient, fp8_format="hybrid", **how):
    inputs.requires_grad_()
    outputs = formats.linear(inputs, weight, fp8_format=fp8_format, **how)
    outputs.backward(outputs_gradient)
    return outputs.detach(), inputs.grad, weight.grad


class Products(TorchDispatchMode):
    """Counts products in 8 bits by the formats of both sides."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is PRODUCT:
            self.seen[args[0].dtype, args[1].dtype] += 1
        return function(*args, **(kwargs or {}))


@each_row("dtype", [torch.bfloat16, torch.float16])
@each_row(("name", "of_gradients"), [("e4m3", torch.float8_e4m3fn), ("hybrid", torch.float8_e5m2)])
@each_row("rows", [(6, 4), (7, 1), (3,)])  # tokens in any number
def test_products_equal_those_of_rounded_matrices(rows, name, of_gradients, dtype):
    inputs, weight, gradient = (
        values(*size, seed=seed, dtype=dtype, scale=scale)
        for seed, (size, scale) in enumerate([((*rows, 32), 1.0), ((48, 32), 0.02), ((*rows, 48), 1e-3)])
    )
    outputs, of_inputs, of_weight = ran(inputs, weight.requires_grad_(), gradient, name)
    x, w, g = rounded(inputs.detach()), rounded(weight.detach()), rounded(gradient, of_gradients)
    near = dict(rtol=1e-2, atol=1e-6, check_dtype=False)  # sums of 16 bits
    torch.testing.assert_close(outputs, x @ w.t(), **near)
    torch.testing.assert_close(of_inputs, g @ w, **near)
    torch.testing.assert_close(of_weight, g.flatten(0, -2).t() @ x.flatten(0, -2), **near)
    assert {outputs.dtype, of_inputs.dtype, of_weight.dtype} == {dtype}
    assert outputs.shape == gradient.shape and of_inputs.shape == inputs.shape


def test_frozen_weight_skips_only_weight_gradient():
    found, seen = [], []
    for learns in (True, False):
        with Products() as products:
            found.append(ran(values(32, 16), values(48, 16, seed=1).requires_grad_(learns), values(32, 48, seed=2)))
        seen.append(products.seen)
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert found[1][2] is None
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    assert seen == [{(e4m3, e4m3): 1, (e5m2, e4m3): 2}, {(e4m3, e4m3): 1, (e5m2, e4m3): 1}]


def test_expert_without_tokens_gets_zero_gradient():
    weight = values(48, 16).requires_grad_()
    outputs, of_inputs, of_weight = ran(values(0, 16), weight, values(0, 48))
    assert outputs.shape == (0, 48) and of_inputs.shape == (0, 16)
    assert torch.equal(of_weight, torch.zeros_like(weight))


def test_zeros_and_tiny_values_stay_finite():
    for scale in (0.0, 1e-38):
        weight = values(48, 16, seed=1).requires_grad_()
        found = ran(values(32, 16, scale=scale), weight, values(32, 48, seed=2, scale=scale))
        assert all(tensor.isfinite().all() for tensor in found)


@each_row("wrong", [float("inf"), float("nan")])
def test_non_finite_gradient_is_propagated(wrong):
    gradient, weight = values(32, 48, seed=2), values(48, 16, seed=1).requires_grad_()
    gradient[3, 5] = wrong
    _, of_inputs, of_weight = ran(values(32, 16), weight, gradient)
    assert not of_inputs.isfinite().all() and not of_weight.isfinite().all()


def test_bias_is_added():
    inputs, weight, bias = values(32, 16), values(48, 16, seed=1), values(48, seed=2)
    without = formats.linear(inputs, weight, fp8_format="e4m3")
    assert torch.equal(formats.linear(inputs, weight, bias, fp8_format="e4m3"), without + bias)
