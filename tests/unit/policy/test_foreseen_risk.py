"""What ``auto`` expects ``selective`` to lose, against the policy itself with the flags that ``auto`` would set."""

import pytest

from moc.policy import Every
from moc.policy.selective import Selective
from moc.simulate.live_costs import Running, SavedBytes, flags_of_candidate, priced
from moc.simulate.policies import Options
from tests.cases import each_row
from tests.unit.policy.test_pec import operators, persist, take
from tests.unit.policy.test_selective_choice import FULL_BYTES, Told

LAYERS, EXPERTS = 24, 32
SKIPPED = 10


@pytest.fixture(scope="module")
def run(trace):
    """A run on two nodes that has had the tokens of all of them, and copies of everything hide."""
    saved = SavedBytes(10.0 + EXPERTS, {k: 10.0 + k for k in range(1, EXPERTS + 1)}, [], gradient=1 / 3)
    loads = {layer: [sum(row[layer][e] for row in trace) for e in range(EXPERTS)] for layer in range(LAYERS)}
    rates = dict(copy_rate=50.0, write_rate=25.0, replicate_rate=500.0)
    return Running("peers", 2, 1, saved, iteration_s=1.0, forward_backward_s=0.9, loads=loads, **rates)


def foreseen(run, experts, gradients):
    """The candidate with so many experts."""
    machine = run.machine_with(Options(interval=1, replicas=1))
    fixed = {"bytes": round(experts * machine.expert_bytes)} if gradients else {"experts": experts, "gradients": "off"}
    return priced(run, "selective", Options(interval=1, replicas=1, own=fixed))


def happened(found, trace, experts):
    """The mean over snapshots of the tokens that a fault would lose: of what memory lacks."""
    flags = flags_of_candidate(found)
    gradients = flags.get("selective_gradients") != "off"
    settings = dict(gradients=gradients, score="tokens" if gradients else "tokens-age", tier="peers")
    every = flags["persist_interval"]
    assert flags["snapshot_interval"] == "1"
    model = operators((1,) * LAYERS, experts=EXPERTS)
    number = {"bytes": experts * LAYERS * FULL_BYTES} if gradients else {"experts": experts}
    policy = Selective(model, Every(1), **number, **settings)
    policy.on_sizes(Told())
    load = {layer: [0] * EXPERTS for layer in range(LAYERS)}
    persist(policy, 1, load)
    risks = []
    for iteration, row in enumerate(trace, start=2):
        load = {layer: [a + b for a, b in zip(load[layer], tokens, strict=True)] for layer, tokens in enumerate(row)}
        persist(policy, iteration, load) if iteration % every == 0 else take(policy, iteration, load)
        risks.append(policy.state.mlt)
    return sum(risks[SKIPPED:]) / len(risks[SKIPPED:])


@each_row(("experts", "gradients", "within"), [(2, False, 0.15), (4, False, 0.15), (2, True, 0.15), (4, True, 0.3)])
def test_predicted_lost_tokens_match_policy(run, trace, experts, gradients, within):
    found = foreseen(run, experts, gradients)
    told = happened(found, trace, experts)
    assert found.saving.at_risk == pytest.approx(told, rel=within)
    assert found.plt == pytest.approx(found.saving.at_risk / 3600)


def test_covering_gradients_predict_and_lose_little(run, trace):
    found = foreseen(run, 8, gradients=True)
    states = foreseen(run, 8, gradients=False)
    assert max(found.saving.at_risk, happened(found, trace, 8)) < 0.05 < 0.2 < states.saving.at_risk
