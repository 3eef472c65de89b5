"""What is said before training of what a fault will cost."""

import pytest

from moc.policy import Every, policy_named
from moc.policy.interval import IntervalTuner
from moc.policy.pec import Pec
from tests.cases import each_row
from tests.model_shape import ModelShape, model_operators
from tests.unit.policy.test_pec import persist, take
from tests.unit.pretraining.flags import parse

TIERS = {
    "disk": "--pec-k 1",
    "memory alone": "--pec-k-snapshot 4 --pec-k-persist 1 --ckpt-tier memory",
    "peers alone": "--pec-k-snapshot 4 --pec-k-persist 1 --ckpt-tier peers",
    "memory and storage": "--pec-k-snapshot 4 --pec-k-persist 1 --ckpt-tier memory --persist-interval 50",
}


def told(flags: str, **settings) -> tuple[str, dict] | None:
    """Of 16 experts, with a snapshot in every tenth of 10,000 iterations."""
    snapshot = parse(f"--ckpt-policy pec --ckpt-dir x --snapshot-interval 10 {flags}").snapshot
    shape = ModelShape((1,), 8, 16, 8, 8, 4, 100, num_experts=16, expert_ffn_hidden_size=16)
    k, k_persist = snapshot.experts
    every = (snapshot.persist_interval or 10) // 10
    policy = Pec(model_operators(shape), Every(10), k, k_persist, persist_every=every, **settings)
    in_memory = snapshot.ckpt_tier != "disk"
    in_storage = not in_memory or snapshot.persist_interval is not None
    return policy.report.fault_cost(10_000, in_memory, in_storage)


@each_row("tier", TIERS)
def test_expected_fault_cost_follows_from_flags(tier):
    text, fields = told(TIERS[tier])
    if tier == "disk":  # ages of 0 to 15 snapshots
        assert fields == {"plt": pytest.approx(75 / 10_000), "oldest": 150}
        assert "0.750%" in text and " 150 iterations" in text
        return
    assert fields["plt"] == pytest.approx(15 / 10_000) and fields["oldest"] == 30
    assert "0.150%" in text and " 30 iterations" in text
    if tier == "memory and storage":  # one expert of 16 in every fifth snapshot
        assert fields["plt_storage"] == pytest.approx(375 / 10_000) and fields["oldest_storage"] == 750
        assert "3.750%" in text and " 750 iterations" in text and "--persist-interval" not in text
    else:
        assert fields.keys() == {"plt", "oldest"} and "--persist-interval" in text


def test_fault_cost_of_load_aware_selection_is_not_predicted():
    assert told(TIERS["disk"], selection="load_aware") is None


def made(experts, k, k_persist, every=1, interval=1, **settings):
    shape = ModelShape((1,), 64, 256, 64, 64, 16, 1000, num_experts=experts, expert_ffn_hidden_size=256)
    return policy_named("pec")(
        model_operators(shape), Every(interval), k=k, k_persist=k_persist, persist_every=every, **settings
    )


@each_row("interval", [1, 10])
@each_row(
    ("experts", "k", "k_persist", "every"), [(16, 4, 1, 1), (16, 4, 1, 5), (16, 4, 1, 4), (8, 3, 2, 3), (8, 8, 8, 2)]
)
def test_expected_ages_match_policy(experts, k, k_persist, every, interval):
    policy, memory, storage, seen = made(experts, k, k_persist, every, interval), {}, {}, ([], [])
    for snapshot in range(1, 80 * every + 1):
        iteration = snapshot * interval
        persists = snapshot == 1 or snapshot % every == 0
        plan, part = persist(policy, iteration) if persists else (take(policy, iteration), None)
        chosen = [name for name in plan.operators if ".expert." in name]
        memory |= dict.fromkeys(chosen, iteration)
        if part is not None:
            storage |= dict.fromkeys((name for name in part.operators if ".expert." in name), iteration)
        if snapshot > 40 * every:
            seen[0].append([iteration - when for when in memory.values()])
            if snapshot % every == 0:
                seen[1].append([iteration - when for when in storage.values()])
    for told, ages in zip(policy.expected(persists=True), seen, strict=True):
        flat = [age for row in ages for age in row]
        assert told.mean == pytest.approx(sum(flat) / len(flat), rel=0.06)
        assert abs(told.oldest - max(flat)) <= interval * every  # where the turn stands still


def test_expected_ages_match_figure_15_for_both_tiers():
    """MoC-System, Figure 15(a): N = 16, K_snapshot = 4, K_persist = 1."""
    memory, storage = made(16, 4, 1).expected(persists=True)
    assert (memory.mean, memory.oldest) == (1.5, 3) and (storage.mean, storage.oldest) == (7.5, 15)
    assert made(16, 4, 1).expected(persists=False) == (memory, None)


def test_unknown_fault_cost_is_not_predicted():
    assert made(8, 1, 1, selection="load_aware").expected(True) is None
    shape = ModelShape((0, 0), 64, 256, 64, 64, 16, 1000)
    assert policy_named("pec")(model_operators(shape), Every(1)).expected(True) is None
    assert policy_named("pec")(made(8, 1, 1).operators, IntervalTuner(), k=1).expected(True) is None
