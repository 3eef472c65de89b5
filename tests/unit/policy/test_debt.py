"""Tokens that experts lost to a recovery, and what of them is made up, from one iteration to the next."""

import dataclasses
import json

from moc.policy.token_ledger import TokenDebt, TokenLedger
from tests.errors import raises

LAYERS = {0: 2, 3: 2}


def trained(ledger, counts=(10, 20, 30, 40), beyond=None):
    """One more iteration."""
    tables = [{0: row[:2], 3: row[2:]} for row in (counts, beyond) if row is not None]
    return ledger.after_iteration(tables[0], None, *tables[1:])


def base():
    """After three iterations, the first of which all experts were saved at."""
    ledger = (
        trained(TokenLedger.empty(LAYERS))
        .with_snapshot({layer: range(2) for layer in LAYERS})
        .with_snapshot_completed(1)
    )
    return trained(trained(ledger))


def recovered(ledger, iterations=5):
    """It resumes with an expert as of the first iteration."""
    return ledger.after_recovery({0: {0: 1}}).with_debt(ledger, iterations)


def test_lost_tokens_become_debt():
    ledger = recovered(base())
    assert ledger.remaining_debt == {0: (20, 0), 3: (0, 0)} == ledger.lost
    assert base().with_debt(base(), 5).debt is None and base().remaining_debt == {}
    assert base().after_recovery({}).with_debt(base(), 5).debt is None


def test_only_tokens_beyond_capacity_reduce_debt():
    ledger = trained(recovered(base()))
    assert ledger.remaining_debt[0] == (20, 0) and ledger.debt.left == 4
    ledger = trained(ledger, beyond=(12, 7, 0, 0))
    assert ledger.remaining_debt == {0: (8, 0), 3: (0, 0)} and ledger.debt.totals == (20, 12)
    assert ledger.given[0] == (50, 100)  # they are among those processed
    assert ledger.lost == {0: (20, 0), 3: (0, 0)}  # what was lost stays booked
    ledger = trained(ledger, beyond=(9, 0, 0, 0))
    assert ledger.remaining_debt == {} and ledger.debt.left == 0 and ledger.debt.totals == (20, 20)
    assert trained(ledger).debt == ledger.debt


def test_remaining_debt_is_dropped_after_its_iterations():
    ledger = trained(trained(recovered(base(), iterations=2)), beyond=(5, 0, 0, 0))
    assert ledger.remaining_debt == {} and ledger.debt.totals == (20, 5)
    again = ledger.after_recovery({0: {1: 1}}).with_debt(ledger, 2)  # of iterations 2 to 5
    assert again.remaining_debt == {0: (0, 80), 3: (0, 0)}


def test_later_recovery_adds_to_debt():
    ledger = trained(recovered(base()), beyond=(12, 0, 0, 0))
    same = ledger.after_recovery({}).with_debt(ledger, 5)
    assert same.debt == ledger.debt  # nothing more is lost, so it goes on as it would have
    again = ledger.after_recovery({0: {0: 1}, 3: {1: 1}}).with_debt(ledger, 5)
    assert again.remaining_debt == {0: (8 + 10, 0), 3: (0, 120)}  # what made up for it is lost, too
    assert again.debt.left == 5


def test_tokens_recovered_later_reduce_debt():
    stale = recovered(base())
    found = trained(stale).after_recovery({0: {0: 3}}, [base()])  # the state of iteration 3, before it was lost
    assert found.lost[0] == (10, 0) and found.with_debt(trained(stale), 5).remaining_debt == {0: (10, 0), 3: (0, 0)}
    better = dataclasses.replace(stale, learned=base().learned)
    assert better.with_debt(stale, 5).remaining_debt == {} and better.with_debt(stale, 5).debt.left == 0


def test_debt_survives_json_and_older_ledgers_have_none():
    ledger = trained(recovered(base()), beyond=(12, 0, 0, 0))
    state = json.loads(json.dumps(ledger.state_dict()))
    assert TokenLedger.from_state(state) == ledger
    older = {name: value for name, value in state.items() if name != "debt"}
    assert TokenLedger.from_state(older).debt is None
    for wrong in ({"tokens": []}, {"tokens": [[1]], "made_up": [[0]], "left": 3}):
        with raises("saved-state-invalid"):
            TokenLedger.from_state(state | {"debt": wrong})


def test_iterations_without_compensation_count_towards_limit():
    debt = TokenDebt(((5, 0),), ((0, 0),), 2)
    assert debt.after_iteration([[0, 3]]).remaining_debt == ((5, 0),) and debt.after_iteration(
        [[0, 0]]
    ).after_iteration([[0, 0]]).remaining_debt == ((0, 0),)
