"""Experts make up what they lost to a fault, across a restart, and the ledger knows every token of it."""

import operator
import shutil

import pytest

from moc.policy.token_ledger import TokenLedger, TokenTable
from tests.integration.snapshot_files import events, start, stores, train
from tests.integration.tiny import Trained

SAVED = dict(ckpt_policy="selective", selective_experts=1, snapshot_interval=1, ckpt_blocking=True)
FLAGS = dict(num_experts=8, seq_length=48, moe_aux_loss_coeff=0.0, moe_expert_capacity_factor=1.0)
RECOMPUTED = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
FAULT, HALF, END = 7, 9, 12


def ledger_at(flags: dict, iteration: int) -> TokenLedger:
    """The ledger stored with a snapshot."""
    return TokenLedger.from_state(stores(flags)["storage"].read_manifest(iteration).state["ledger"])


def recount(trained: Trained, what: str) -> TokenTable:
    """What all workers have counted by themselves."""
    return tuple(
        tuple(sum(worker[what].get(f"{layer} {expert}", 0) for worker in trained.workers) for expert in range(8))
        for layer in range(2)
    )


def grown(before: TokenTable, now: TokenTable) -> TokenTable:
    """By how much a table has grown."""
    return tuple(tuple(map(operator.sub, *rows)) for rows in zip(now, before, strict=True))


@pytest.mark.recovery
def test_interruption_does_not_change_compensation(data, tmp_path):
    flags = data | SAVED | FLAGS | RECOMPUTED | dict(selective_boost=0.5, train_iters=END, ckpt_keep=99)
    places = [dict(ckpt_dir=str(tmp_path / name / "c"), log_dir=str(tmp_path / name / "log")) for name in "ab"]
    killed = start("EP2", flags | places[0], "pec_bodies:die_after", iteration=FAULT).wait()
    assert {result.exit for result in killed} == {-9}
    shutil.copytree(tmp_path / "a", tmp_path / "b")

    whole = train("EP2", flags | places[0], "boost_bodies:train")
    half = train("EP2", flags | places[1] | dict(exit_interval=HALF))
    rest = train("EP2", flags | places[1])
    assert (whole.start, half.start, rest.start) == (FAULT, FAULT, HALF)
    assert half.records + rest.records == whole.records and rest.weights == whole.weights
    assert [ledger_at(place, END).debt for place in places] == 2 * [ledger_at(places[0], END).debt]

    base, end = ledger_at(places[0], FAULT), ledger_at(places[0], END)
    assert recount(whole, "processed") == grown(base.given, end.given)
    assert recount(whole, "beyond") == end.debt.made_up and sum(map(sum, end.debt.made_up)) > 20
    assert end.debt.tokens == tuple(end.lost[layer] for layer in end.layers)
    assert all(one["fullest"] <= 1 for one in whole.workers)
    (begun,) = events(places[0], "boost")
    owed = [one["tokens_owed"] for one in events(places[0], "iteration") if one["iteration"] > FAULT]
    assert begun["boosted"] and (begun["iteration"], begun["tokens"]) == (FAULT, sum(map(sum, end.debt.tokens)))
    assert owed == sorted(owed, reverse=True) and begun["tokens"] > owed[0] > owed[-1]
    assert owed[-1] == begun["tokens"] - end.debt.totals[1]
