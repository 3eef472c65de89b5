"""Equations 5 and 6 give the bytes that a checkpoint really has."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.equations import TARGETS, pec_size
from moc.policy.pec_selection import sequential_experts
from moc.sharding import ParallelLayout, StateBytes, list_save_items
from tests.model_shape import ModelShape, model_operators

GPT_350M_16E = ModelShape(
    (0, 1) * 12, 1024, 4096, 1024, 1024, 64, 50304, positions=2048, num_experts=16, expert_ffn_hidden_size=4096
)
PAPER, OURS = StateBytes(), StateBytes(weights=4, master=0)


@st.composite
def checkpoints(draw):
    """(operators, experts of a layer, names of the chosen ones, K, bytes of each parameter)."""
    layers = tuple(draw(st.lists(st.integers(0, 1), min_size=1, max_size=5)))
    experts, width = draw(st.integers(1, 8)), draw(st.integers(1, 30))
    k = draw(st.integers(1, experts))
    shape = ModelShape((1, *layers), 8, 16, 8, 8, 4, 100, num_experts=experts, expert_ffn_hidden_size=width)
    moe_layers = [layer for layer, has_experts in enumerate(shape.expert_layers) if has_experts]
    chosen = {
        f"layers.{layer}.expert.{expert}"
        for place, layer in enumerate(moe_layers)
        for expert in sequential_experts(draw(st.integers(0, 9)), place, k, experts, 1)
    }
    state = StateBytes(*(draw(st.integers(0, 8)) for _ in range(3)))
    return model_operators(shape), experts, chosen, k, state


def parameters(operators) -> tuple[int, int]:
    """Outside of experts, and in them."""
    experts = sum(o.parameters for o in operators if o.kind == "expert")
    return sum(o.parameters for o in operators) - experts, experts


def listed(operators, state, **how) -> int:
    return sum(item.nbytes for item in list_save_items(operators, ParallelLayout(1), state, **how))


@settings(deadline=None)
@given(checkpoints(), st.sampled_from(TARGETS), st.booleans())
def test_pec_size_equals_sum_of_save_items(checkpoint, target, keep_master):
    operators, experts, chosen, k, state = checkpoint
    weights = dataclasses.replace(state, master=0, moments=0)
    optimizer = dataclasses.replace(state, weights=0)
    of_all = {"weights": optimizer, "optimizer": weights}.get(target, StateBytes(0, 0, 0))
    of_chosen = {"weights": weights, "optimizer": optimizer, "both": state}[target]
    kept = keep_master and target != "weights"  # there all of them are there anyway
    size = listed(operators, of_all) + listed(operators, of_chosen, chosen_experts=chosen, keeps_master=kept)
    assert pec_size(*parameters(operators), k, experts, state, target, keep_master) == pytest.approx(size, rel=1e-12)


@settings(deadline=None)
@given(checkpoints())
def test_saving_all_experts_equals_equation_5(checkpoint):
    operators, experts, _, _, state = checkpoint
    assert pec_size(*parameters(operators), experts, experts, state) == listed(operators, state)


def of_full(target, state=PAPER, **how) -> float:
    count = parameters(model_operators(GPT_350M_16E))
    return pec_size(*count, 1, 16, state, target, **how) / pec_size(*count, 16, 16, state)


def test_table_3_is_matched_to_two_digits():
    """Master weights of all experts are in it: "O" and "WO" are the moments, and they with the weights."""
    assert [round(of_full(target, keep_master=True), 2) for target in TARGETS] == [0.88, 0.54, 0.42]
    assert of_full("both", keep_master=True) == pytest.approx(0.423, abs=0.002)  # section 6.2.1: 57.7 % less


def test_equation_6_is_much_smaller_than_table_3():
    assert of_full("both") == pytest.approx(0.191, abs=0.0005)
    assert of_full("optimizer") == pytest.approx(0.306, abs=0.0005)


def test_format_v1_sizes_exclude_compute_weights():
    """Compute weights follow from the master's and are not saved: 4 bytes of weights and 8 of moments."""
    assert [round(of_full(target, OURS), 3) for target in TARGETS] == [0.73, 0.46, 0.191]
