"""Numbers of experts to choose from, and the tokens that faults are expected to lose with each."""

import pytest

from moc.policy import Every, policy_named
from moc.policy.pec_selection import candidate_expert_counts, expert_ages, mean_age
from moc.policy.token_ledger import TokenLedger
from tests.cases import each_row
from tests.model_shape import ModelShape, model_operators
from tests.unit.policy.test_pec import persist


@each_row(("k_snapshot", "k_persist", "interval"), [(1, 1, 1), (3, 1, 2), (3, 2, 1), (4, 2, 3), (5, 4, 1), (8, 8, 5)])
@each_row("from_storage", [0, 3])
def test_expected_plt_matches_ledger(k_snapshot, k_persist, interval, from_storage):
    """A policy plans for 8 equally busy experts, and at some checkpoint some were on a node that is lost."""
    shape = ModelShape((1,), 64, 256, 64, 64, 16, 1000, num_experts=8, expert_ffn_hidden_size=256)
    policy = policy_named("pec")(model_operators(shape), Every(interval), k=k_snapshot, k_persist=k_persist)
    ledger, losses = TokenLedger.empty({0: 8}), []
    for iteration in range(1, 400 * interval + 1):
        ledger = ledger.after_iteration({0: [5] * 8})
        if policy.plan(iteration) is None:
            continue
        plan, part = persist(policy, iteration)
        saved = [[e for e in range(8) if f"layers.0.expert.{e}" in one.operators] for one in (plan, part)]
        ledger = (
            ledger.with_snapshot({0: saved[0]}, {0: saved[1]})
            .with_snapshot_completed(iteration)
            .with_persist_completed(iteration)
        )
        if iteration > 200 * interval:
            (memory,), (storage,) = ledger.memory, ledger.storage
            for first in range(8):  # every expert once from storage, so that the mean over them is taken
                gone = [(first + i) % 8 for i in range(from_storage)]
                restored = {e: (storage if e in gone else memory)[e].iteration for e in range(8)}
                losses.append(ledger.after_recovery({0: restored}).plt() * ledger.iteration)
    memory, storage = (ages.scaled(interval).mean for ages in expert_ages(8, k_snapshot, k_persist))
    expected = from_storage / 8 * storage + (1 - from_storage / 8) * memory
    assert sum(losses) / len(losses) == pytest.approx(expected, rel=1e-2)
    assert memory == interval * mean_age(8, k_snapshot)


def test_candidate_expert_counts_include_all_or_powers_of_two():
    assert (
        candidate_expert_counts(1) == [1]
        and candidate_expert_counts(3) == [1, 2, 3]
        and candidate_expert_counts(16) == list(range(1, 17))
    )
    assert candidate_expert_counts(17) == [1, 2, 4, 8, 16, 17] and candidate_expert_counts(64) == [
        1,
        2,
        4,
        8,
        16,
        32,
        64,
    ]
