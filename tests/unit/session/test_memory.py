"""Memory of snapshots: as the documentation states it, as it is predicted, and as it is allocated."""

import re
from pathlib import Path
from types import SimpleNamespace

from moc.policy import POLICIES, Every, policy_named
from moc.policy.expert_selection import ExpertSizes
from moc.recovery.expert_versions import max_retained
from moc.session.memory import (
    RunProgress,
    SnapshotWindow,
    next_window,
    plans_ahead,
    retained_files,
)
from moc.simulate.live_costs import host_bytes
from moc.snapshot.buffer_pool import Rotation
from moc.state.operators import Detail
from moc.store.host_memory import RankMemory, ReservedMemory, most_copies, reserved_bytes, spare_buffers
from tests.cases import each_row
from tests.model_shape import ModelShape, model_operators
from tests.worlds import REPOSITORY

PAGE = Path(REPOSITORY) / "docs/how-to/choose-a-policy.md"
S, P, E, K = 1000.0, 400.0, 300.0, 50.0
OPERATORS = model_operators(ModelShape((0, 1), 8, 16, 8, 8, 4, 100, num_experts=4, expert_ffn_hidden_size=16))
EIGHT = model_operators(ModelShape((0, 1), 8, 16, 8, 8, 4, 100, num_experts=8, expert_ffn_hidden_size=16))
KEPT = {"sparse": lambda window: 2 * window - 1, "gradient": lambda window: window}


def columns() -> dict[str, list[str]]:
    """Cells of the table of costs, by policy."""
    text = PAGE.read_text().partition("## What each costs")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in rows}


def value(cell: str, window: int) -> float:
    """Value of a formula such as ``S + (3 W - 1) P``."""
    formula = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", cell.strip("`"))
    return eval(formula, {"S": S, "P": P, "E": E, "K": K, "W": window})


def snapshots_of(policy: str, window: int) -> SnapshotWindow:
    return SnapshotWindow(window, KEPT[policy](window), int(P)) if policy in KEPT else SnapshotWindow()


@each_row("window", [2, 3, 8])
@each_row("policy", ["full", "sparse", "gradient", "pec", "selective", "auto"])
def test_table_matches_number_of_allocated_buffers(policy, window):
    _, memory, peers, copy, *_ = columns()[policy]
    of, carries = snapshots_of(policy, window), policy in ("pec", "selective")
    for tier, cell in (("memory", memory), ("peers", peers)):
        spare = spare_buffers(tier)
        most = Rotation.of(spare, keep=True).max_buffers(of.length, of.kept)
        experts = carries * (E + (spare - 1) * K)
        assert reserved_bytes(most, S, of.snapshot) + experts == value(cell, window)
    experts = carries * (E + (spare_buffers("peers") - 1) * K)
    assert reserved_bytes(most_copies(of.kept, spare_buffers("peers")), S, of.snapshot) + experts == value(copy, window)


@each_row("window", [2, 3, 8])
@each_row("policy", ["full", "sparse", "gradient"])
def test_planner_predicts_allocated_memory(policy, window):
    _, memory, peers, copy, *_ = columns()[policy]
    of = snapshots_of(policy, window)
    kept = of.kept if of.snapshot else None
    price = SimpleNamespace(snapshots_in_memory=kept, window_length=of.length, snapshots=[P] * window)
    assert host_bytes("memory", 2, S, 0, price) == 2 * value(memory, window)
    assert host_bytes("peers", 2, S, 2, price) == 2 * (value(peers, window) + 2 * value(copy, window))
    assert host_bytes("disk", 2, S, 0, price) == 2 * 2 * S


def test_every_policy_has_row():
    assert columns().keys() == {*POLICIES, "auto"}


@each_row("behind", [0, 1, 2])
@each_row("k", [1, 2, 3])
def test_experts_are_retained_once_until_durable(k, behind):
    policy = policy_named("pec")(EIGHT, Every(1), k=k)
    before = policy.state_dict()
    names = [one.name for one in EIGHT if one.expert is not None]
    files = retained_files(
        policy, [{"full": dict.fromkeys(names, 60)}, {"full": dict.fromkeys(names, 40)}], behind, RunProgress()
    )
    assert files == {"expert_full": [100] * (8 + behind * k)} and policy.state_dict() == before


def test_node_reserves_files_for_experts_it_saves():
    policy = policy_named("pec")(EIGHT, Every(100), k=1)
    assert retained_files(policy, [{"full": {"layers.1.expert.0": 60}}], 1, RunProgress()) == {
        "expert_full": [60, 60]
    }  # its next version, too
    assert retained_files(policy, [{"full": {}}], 1, RunProgress()) == {}


def test_fewer_busy_experts_have_longer_gradient_chains():
    policy = policy_named("selective")(EIGHT, Every(1), experts=1, gradients=True, score="tokens")
    experts = {one.expert_id: one.name for one in EIGHT if one.expert_id is not None}
    full, gradients = ({place: {0: size} for place in experts} for size in (60, 20))
    policy.sizes.append(ExpertSizes({0: 0}, full, (0,), 0, gradients))
    parts = [{"full": dict.fromkeys(experts.values(), 60), "grad": dict.fromkeys(experts.values(), 20)}]
    equal, skewed = (
        max_retained(plans_ahead(policy, popularity, RunProgress()), frozenset(experts.values()), 1)
        for popularity in (lambda expert: 64, lambda expert: 64 / (1 + expert))
    )
    assert skewed[Detail.GRAD] > equal[Detail.GRAD] > 0
    found = {name: len(sizes) for name, sizes in retained_files(policy, parts, 1, RunProgress()).items()}
    assert found == {f"expert_{d.value}": max(equal[d], skewed[d]) for d in (Detail.FULL, Detail.GRAD)}


@each_row("window", [2, 3])
@each_row("policy", KEPT)
def test_windows_are_known_before_first_snapshot(policy, window):
    of = policy_named(policy)(OPERATORS, Every(1), window=window)
    before = of.state_dict()
    share = lambda operators, compared: SimpleNamespace(layout=SimpleNamespace(nbytes=len(operators)))  # noqa: E731
    found = next_window(of, SimpleNamespace(with_gradients=share), 0)
    assert (found.length, found.kept) == (window, KEPT[policy](window))
    assert found.snapshot == len(OPERATORS) and of.state_dict() == before


def test_node_with_largest_memory_need_counts():
    sizes = [
        RankMemory([10, 10], [5], 1, 0, {"expert_full": [2, 2]}),
        RankMemory([20, 20], [7], 1, 3, {"expert_full": [3], "expert_grad": [1]}),
        RankMemory([1], [9], 1, 0, {}),
    ]
    found = ReservedMemory.of(sizes, ["a", "b", "b"], [["b"], ["a"], ["a"]])
    assert (
        ReservedMemory.most(found.values())
        == found["b"]
        == ReservedMemory(own=41, copies=5, small=4, logs=3, experts=8)
    )
    assert ReservedMemory.of(sizes[:1], ["a"], []) == {"a": ReservedMemory(20, copies=0, small=1, logs=0, experts=4)}
