"""Adam's update from saved gradients: bit by bit what torch's optimizer had computed."""

from dataclasses import replace

import pytest
import torch

from moc.state.adam import Rule, Rules, gradient_factor, kind_of, update
from tests.cases import each_row

NAME = "decoder.layers.3.mlp.experts.experts.7.linear_fc1.weight"
CLIP, SCALE, SKIPPED, STEPS = 0.5, 1024.0, 9, 24
SHAPE = (37, 5)


def trained(adam: type[torch.optim.Adam], dtype: torch.dtype = torch.float32) -> tuple[dict, list[tuple]]:
    """A parameter after some updates, and of each its rule, norm and gradient; no gradient if it was skipped."""
    torch.manual_seed(1)
    parameter = torch.nn.Parameter(torch.randn(SHAPE))
    optimizer = adam([parameter], lr=1.0, betas=(0.8, 0.97), eps=1e-7, weight_decay=0.1)
    (group,), told = optimizer.param_groups, []
    for iteration in range(STEPS):
        group["lr"], group["weight_decay"] = 1e-2 / (1 + iteration), 0.1 + iteration / 100  # schedules
        gradient = (torch.randn(SHAPE) * SCALE * (4.0 if iteration % 3 else 0.01)).to(dtype)
        norm = float("inf") if iteration == SKIPPED else float((gradient.float() / SCALE).norm())
        rule = Rule(group["lr"], group["weight_decay"], 0.8, 0.97, 1e-7, decoupled=adam is torch.optim.AdamW)
        told.append((rule, norm, gradient))
        if iteration != SKIPPED:
            clip = min(1.0, CLIP / (norm + 1e-6))
            parameter.grad = gradient.float() * (clip / SCALE)
            optimizer.step()
    state = optimizer.state[parameter]
    return {"master": parameter.detach(), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}, told


def folded(told: list[tuple], clip=CLIP, scale=SCALE, skips=True, counts=True, change=lambda rule: rule) -> dict:
    torch.manual_seed(1)
    state, step = {"master": torch.randn(SHAPE)}, 0
    state |= {slot: torch.zeros(SHAPE) for slot in ("exp_avg", "exp_avg_sq")}
    for rule, norm, gradient in told:
        if norm == float("inf") and skips:
            continue
        factor = gradient_factor(norm if norm < float("inf") else 1.0, clip, scale)
        update(state, gradient, step if counts else 99, change(rule), factor)
        step += 1
    return state


def equal(one: dict, other: dict) -> bool:
    return all(torch.equal(one[slot], other[slot]) for slot in one)


@each_row("adam", [torch.optim.AdamW, torch.optim.Adam])
@each_row("dtype", [torch.float32, torch.bfloat16])
def test_updates_from_gradients_match_optimizer_bit_by_bit(adam, dtype):
    state, told = trained(adam, dtype)
    assert sum(norm > CLIP for _, norm, _ in told) > 5 and equal(state, folded(told))


@each_row(
    "omission",
    [
        dict(counts=False),  # bias correction
        dict(clip=0.0),
        dict(scale=1.0),
        dict(skips=False),
        dict(change=lambda rule: replace(rule, weight_decay=0.0)),
        dict(change=lambda rule: replace(rule, weight_decay=0.1)),  # its schedule
        dict(change=lambda rule: replace(rule, lr=1e-2)),
        dict(change=lambda rule: replace(rule, decoupled=False)),
        dict(change=lambda rule: replace(rule, eps=1e-8)),
    ],
    ids=["bias", "clip", "scale", "skip", "decay", "decay schedule", "rate schedule", "decoupled", "eps"],
)
def test_each_part_of_update_rule_is_required(omission):
    state, told = trained(torch.optim.AdamW)
    assert not equal(state, folded(told, **omission))


def test_splitting_parameter_anywhere_changes_no_bit():
    state, told = trained(torch.optim.AdamW)
    rule, norm, gradient = told[-1]
    whole = {slot: values.clone().view(-1) for slot, values in state.items()}
    parts = [{slot: values[:131].clone() for slot, values in whole.items()}]
    parts.append({slot: values[131:].clone() for slot, values in whole.items()})
    factor = gradient_factor(norm, CLIP, SCALE)
    update(whole, gradient.view(-1), STEPS, rule, factor)
    for part, its in zip(parts, gradient.view(-1).split([131, gradient.numel() - 131]), strict=True):
        update(part, its, STEPS, rule, factor)
    assert all(torch.equal(whole[slot], torch.cat([part[slot] for part in parts])) for slot in whole)


def test_unsupported_state_is_refused():
    state = {slot: torch.zeros(2) for slot in ("master", "exp_avg", "exp_avg_sq")}
    rule = Rule(1e-3, 0.1, 0.9, 0.999, 1e-8, True)
    with pytest.raises(ValueError, match="not Adam's in fp32"):
        update(state | {"exp_avg": torch.zeros(2, dtype=torch.bfloat16)}, torch.ones(2), 0, rule, 1.0)
    with pytest.raises(ValueError, match="not Adam's in fp32"):
        update({"master": torch.zeros(2)}, torch.ones(2), 0, rule, 1.0)
    with pytest.raises(ValueError, match="multiplied by"):
        update(state, torch.ones(2), 0, rule, float("nan"))


def test_parameter_kinds_are_distinguished_from_numbers():
    assert kind_of(NAME) == "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    one, other = Rule(1e-3, 0.1, 0.9, 0.999, 1e-8, True), Rule(1e-3, 0.0, 0.9, 0.999, 1e-8, True)
    bias = NAME.replace("weight", "bias")
    rules = Rules.of(1.0, [(kind_of(NAME), one), (kind_of(bias), other), (kind_of(NAME.replace("7", "8")), one)])
    assert rules.by_kind == {kind_of(NAME): one, kind_of(bias): other}
    assert Rules.from_plain(rules.to_plain()) == rules
    assert Rules.of(1.0, [(kind_of(NAME), one), (kind_of(NAME), other)]).by_kind == {}  # layers with rates of their own
