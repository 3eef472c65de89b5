"""Adam's moments in 8 and 16 bits: what is kept of them, and what an update makes of it."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.pretraining.engine import small_moments
from megatron.pretraining.engine.small_moments import SmallMomentsAdam
from tests.cases import each_row

SMALL = dict(exp_avg="fp8", exp_avg_sq="fp16")
GROUP = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)


def values(*size, seed=0, dtype=torch.float32):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def optimizer_of(*tensors, **formats):
    return SmallMomentsAdam([dict(params=list(tensors), **GROUP)], **(SMALL | formats))


def update(optimizer, *gradients):
    for parameter, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def kept(optimizer):
    return [
        {
            name: value.view(-1).view(torch.uint8).tolist()
            for name, value in optimizer.state[p].items()
            if name != "step"
        }
        for p in optimizer.param_groups[0]["params"]
    ]


def test_state_takes_three_bytes_per_parameter():
    weight = values(8, 4)
    optimizer = optimizer_of(weight)
    update(optimizer, values(8, 4, seed=1))
    state = optimizer.state[weight]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.float8_e4m3fn, torch.float16)
    before = {name: state[name].data_ptr() for name in ("exp_avg", "exp_avg_sq")}
    update(optimizer, values(8, 4, seed=2))
    assert {name: state[name].data_ptr() for name in before} == before


@each_row("dtype", [torch.float32, torch.bfloat16])
def test_fp32_moments_equal_torch_adam(dtype):
    mine, theirs = (values(64).to(dtype).float() for _ in range(2))
    ours, adam = (
        optimizer_of(mine, exp_avg="fp32", exp_avg_sq="fp32"),
        torch.optim.AdamW([dict(params=[theirs], **GROUP)]),
    )
    for seed in range(5):
        update(ours, values(64, seed=seed))
        update(adam, values(64, seed=seed))
    assert torch.equal(mine, theirs)


def test_moments_equal_adam_except_for_rounding():
    mine, theirs = values(4096), values(4096)
    ours, adam = optimizer_of(mine), torch.optim.AdamW([dict(params=[theirs], **GROUP)])
    for seed in range(100):
        gradient = values(4096, seed=seed) * 1e-6  # as small as they are in models of billions of parameters
        update(ours, gradient)
        update(adam, gradient)
    mean, square = small_moments._decoded(ours.state[mine])
    exact = adam.state[theirs]
    assert torch.allclose(square, exact["exp_avg_sq"], rtol=0.05)
    assert (mean - exact["exp_avg"]).norm() < 0.1 * exact["exp_avg"].norm()
    assert (mine - theirs).norm() < 0.1 * (theirs - values(4096)).norm()


def test_second_moment_decays_without_gradients():
    weight = values(512)
    optimizer = optimizer_of(weight)
    update(optimizer, values(512, seed=1))
    first = small_moments._decoded(optimizer.state[weight])[1]
    for _ in range(1000):
        update(optimizer, torch.zeros(512))
    left = small_moments._decoded(optimizer.state[weight])[1] / first
    exact = 0.999**1000  # 0.37; rounding makes it fall at most twice as fast, and never stand still
    assert left.max() < 1.1 * exact and left.min() > 0.9 * exact**2


def test_parameters_without_gradient_are_unchanged():
    frozen, starved = values(16), values(16, seed=1)
    optimizer = optimizer_of(frozen, starved)
    update(optimizer, values(16, seed=2), values(16, seed=3))
    before, weight = kept(optimizer)[0], frozen.clone()
    update(optimizer, None, torch.zeros(16))
    assert kept(optimizer)[0] == before and torch.equal(frozen, weight)
    new = values(16)
    optimizer = optimizer_of(new)
    update(optimizer, torch.zeros(16))
    update(optimizer, torch.zeros(16))
    assert not any(any(bits) for bits in kept(optimizer)[0].values())
    update(optimizer, values(16, seed=4))
    assert new.isfinite().all()


def test_slices_are_updated_like_complete_tensor(monkeypatch):
    monkeypatch.setattr(small_moments, "_AT_ONCE", 40)
    whole, slices = values(96), list(values(96).split(32))
    one, three = optimizer_of(whole), optimizer_of(*slices)
    for seed in range(10):
        gradient = values(96, seed=seed)
        update(one, gradient)
        update(three, *gradient.split(32))
    assert torch.equal(whole, torch.cat(slices))
    cut = {name: sum((state[name] for state in kept(three)), []) for name in ("exp_avg", "exp_avg_sq")}
    assert cut == kept(one)[0]


def test_16_bit_weights_are_rounded_once():
    weight, exact = values(64, dtype=torch.bfloat16), values(64, dtype=torch.bfloat16).float()
    ours, adam = optimizer_of(weight), torch.optim.AdamW([dict(params=[exact], **GROUP)])
    gradient = values(64, seed=1, dtype=torch.bfloat16)
    update(ours, gradient)
    update(adam, gradient.float())
    assert torch.equal(weight, exact.bfloat16())


@each_row("betas", [(0.9, 0.999), (0.9, 0.95), (0.95, 0.99)])
@given(st.lists(st.floats(-1, 1), min_size=1, max_size=60))
@settings(max_examples=50, deadline=None)
def test_moment_quotient_is_bounded(betas, gradients):
    mean = square = 0.0
    bound = (1 - betas[0]) / math.sqrt(1 - betas[1]) / math.sqrt(1 - betas[0] ** 2 / betas[1])
    for gradient in gradients:
        mean = betas[0] * mean + (1 - betas[0]) * gradient
        square = betas[1] * square + (1 - betas[1]) * gradient**2
        if square > 1e-200:
            assert abs(mean) <= bound * math.sqrt(square) * (1 + 1e-9)
    assert bound * small_moments._SCALE["exp_avg"] < torch.finfo(torch.float8_e4m3fn).max


def test_too_large_moments_are_clipped():
    weight = values(4)
    optimizer = optimizer_of(weight)
    update(optimizer, torch.full((4,), 1e6))
    state = optimizer.state[weight]
    assert state["exp_avg_sq"].eq(65504).all() and state["exp_avg"].float().eq(448).all()
