"""What is said before training of the age of experts is what the policy's snapshots have then."""

import pytest

from moc.policy import Every, policy_named
from moc.policy.interval import IntervalTuner
from moc.state.shape import ModelShape, model_operators
from tests.unit.policy.test_pec import persist, take


def made(experts, k, k_persist, every=1, interval=1, **settings):
    shape = ModelShape((1,), 64, 256, 64, 64, 16, 1000, num_experts=experts, expert_ffn_hidden_size=256)
    return policy_named("pec")(
        model_operators(shape), Every(interval), k=k, k_persist=k_persist, persist_every=every, **settings
    )


@pytest.mark.parametrize("interval", [1, 10])
@pytest.mark.parametrize(
    ("experts", "k", "k_persist", "every"), [(16, 4, 1, 1), (16, 4, 1, 5), (16, 4, 1, 4), (8, 3, 2, 3), (8, 8, 8, 2)]
)
def test_ages_are_those_of_the_policy(experts, k, k_persist, every, interval):
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


def test_two_levels():
    """MoC-System, Figure 15(a): N = 16, K_snapshot = 4, K_persist = 1."""
    memory, storage = made(16, 4, 1).expected(persists=True)
    assert (memory.mean, memory.oldest) == (1.5, 3) and (storage.mean, storage.oldest) == (7.5, 15)
    assert made(16, 4, 1).expected(persists=False) == (memory, None)


def test_nothing_is_said_of_what_is_not_known():
    assert made(8, 1, 1, selection="load_aware").expected(True) is None
    assert made(8, 1, 1, auto=True).expected(True) is None
    shape = ModelShape((0, 0), 64, 256, 64, 64, 16, 1000)
    assert policy_named("pec")(model_operators(shape), Every(1)).expected(True) is None
    assert policy_named("pec")(made(8, 1, 1).operators, IntervalTuner(), k=1).expected(True) is None
