"""Memory of snapshots: as the documentation states it, as it is predicted, and as it is allocated."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from moc.policy import POLICIES, Every, policy_named
from moc.session.memory import RankMemory, ReservedMemory, Window, next_window
from moc.simulate.live_costs import host_bytes
from moc.snapshot.rotation import Rotation
from moc.state.host_memory import most_copies, reserved_bytes, spare_buffers
from moc.state.shape import ModelShape, model_operators
from tests.worlds import REPOSITORY

PAGE = Path(REPOSITORY) / "docs/how-to/choose-a-policy.md"
S, P, E = 1000.0, 400.0, 300.0
OPERATORS = model_operators(ModelShape((0, 1), 8, 16, 8, 8, 4, 100, num_experts=4, expert_ffn_hidden_size=16))
KEPT = {"sparse": lambda window: 2 * window - 1, "gradient": lambda window: window}


def columns() -> dict[str, list[str]]:
    """Cells of the table of costs, by policy."""
    text = PAGE.read_text().partition("## What each costs")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in rows}


def value(cell: str, window: int) -> float:
    """Value of a formula such as ``S + (3 W - 1) P``."""
    formula = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", cell.strip("`"))
    return eval(formula, {"S": S, "P": P, "E": E, "W": window})


def snapshots_of(policy: str, window: int) -> Window:
    return Window(window, KEPT[policy](window), int(P)) if policy in KEPT else Window()


@pytest.mark.parametrize("window", [2, 3, 8])
@pytest.mark.parametrize("policy", ["full", "sparse", "gradient", "pec", "selective", "auto"])
def test_the_table_has_the_number_of_buffers_that_are_allocated(policy, window):
    _, memory, peers, copy, *_ = columns()[policy]
    of, experts = snapshots_of(policy, window), E if policy in ("pec", "selective") else 0
    for tier, cell in (("memory", memory), ("peers", peers)):
        most = Rotation.of(spare_buffers(tier), keep=True).most(of.length, of.kept)
        assert reserved_bytes(most, S, of.snapshot) + experts == value(cell, window)
    assert reserved_bytes(most_copies(of.kept, spare_buffers("peers")), S, of.snapshot) + experts == value(copy, window)


@pytest.mark.parametrize("window", [2, 3, 8])
@pytest.mark.parametrize("policy", ["full", "sparse", "gradient"])
def test_the_planner_predicts_what_is_allocated(policy, window):
    _, memory, peers, copy, *_ = columns()[policy]
    of = snapshots_of(policy, window)
    price = SimpleNamespace(kept=of.kept if of.snapshot else None, length=of.length, snapshots=[P] * window)
    assert host_bytes("memory", 2, S, 0, price) == 2 * value(memory, window)
    assert host_bytes("peers", 2, S, 2, price) == 2 * (value(peers, window) + 2 * value(copy, window))
    assert host_bytes("disk", 2, S, 0, price) == 2 * 2 * S


def test_every_policy_has_a_row():
    assert columns().keys() == {*POLICIES, "auto"}


@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("policy", KEPT)
def test_windows_are_known_before_the_first_snapshot(policy, window):
    of = policy_named(policy)(OPERATORS, Every(1), window=window)
    before = of.state_dict()
    share = lambda operators, compared: SimpleNamespace(layout=SimpleNamespace(nbytes=len(operators)))  # noqa: E731
    found = next_window(of, SimpleNamespace(with_gradients=share), 0)
    assert (found.length, found.kept) == (window, KEPT[policy](window))
    assert found.snapshot == len(OPERATORS) and of.state_dict() == before


def test_the_node_that_needs_most_counts():
    sizes = [RankMemory([10, 10], [5], 1, 0), RankMemory([20, 20], [7], 1, 3), RankMemory([1], [9], 1, 0)]
    found = ReservedMemory.of(sizes, ["a", "b", "b"], [["b"], ["a"], ["a"]])
    assert found == ReservedMemory(own=41, copies=5, small=4, logs=3)
    assert ReservedMemory.of(sizes[:1], ["a"], []) == ReservedMemory(own=20, copies=0, small=1, logs=0)
