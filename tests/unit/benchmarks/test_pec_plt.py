"""What is said of W, O, WO and WO-2L: what is saved is not lost, and memory that is left helps."""

import pytest

from benchmarks.pec_plt import EXPERTS, Case, plt


def lost(way, k, seed=1):
    return plt(Case(way, k, iterations=240, interval=4, faults=2), seed)


def test_only_what_is_left_out_is_lost():
    weights, optimizer, both = (lost(way, 2) for way in ("W", "O", "WO"))
    assert weights["moments"] == 0 < weights["weights"] and optimizer["weights"] == 0 < optimizer["moments"]
    assert both["weights"] == both["moments"] == pytest.approx(weights["weights"], rel=1e-9)


def test_more_experts_lose_less_and_all_lose_nothing():
    one, four, everything = (lost("WO", k)["weights"] for k in (1, 4, EXPERTS))
    assert everything == 0 < four < one


def test_memory_that_is_left_helps():
    """Figure 15(a): with K_persist = 1 throughout, K_snapshot = 4 loses less than K_snapshot = 1."""
    assert lost("WO-2L", 4)["weights"] < lost("WO-2L", 1)["weights"]
