"""What a signed manifest says of its operators agrees with its state, before a run resumes from it."""

from types import SimpleNamespace
from typing import Any

import pytest

from moc.policy.token_ledger import TokenLedger
from moc.session.resume.reading import check_state
from moc.store.errors import CheckpointError
from moc.store.manifest import Manifest, OperatorEntry
from tests.cases import each_row
from tests.errors import raises

ENGINE: Any = SimpleNamespace(check=lambda saved, where: None)
POLICY: Any = SimpleNamespace(name="another")
POSITION = dict(iteration=8, consumed_samples=16, skipped_iterations=0)


def manifest(steps, **state):
    operators = {f"layers.{n}.mlp": OperatorEntry("full", step, {"master": 4}) for n, step in enumerate(steps)}
    return Manifest(8, "full", 1, {}, operators, {}, POSITION | state)


@each_row(
    ("steps", "state"),
    [
        ([7, 7], {"optimizer_step": 7}), ([7, 7], {"optimizer_step": 0}), ([7, 3], {}),
        ([None, None], {"optimizer_step": None}), ([None, None], {"optimizer_step": 7}), ([], {}),
        ([17, 16], {"updates_before": 10}),
    ],
)  # fmt: skip
def test_consistent_updates_are_accepted(steps, state):
    check_state(manifest(steps, **state), "it", ENGINE, POLICY)


@each_row(
    ("steps", "state"),
    [
        ([7, 3], {"optimizer_step": 7}), ([7, 3], {"optimizer_step": 0}), ([7, 1 << 62], {}),
        ([9], {"optimizer_step": 9}),
        ([7, 7], {"optimizer_step": 3}), ([7, None], {"optimizer_step": "7"}),
        ([7, 7], {"optimizer_step": [7]}),
        ([19], {"updates_before": 10}), ([7], {"updates_before": -1}), ([7], {"updates_before": "9"}),
    ],
)  # fmt: skip
def test_inconsistent_updates_are_refused(steps, state):
    with pytest.raises(ValueError):
        check_state(manifest(steps, **state), "it", ENGINE, POLICY)


@each_row("name", POSITION)
def test_state_without_part_of_position_is_refused(name):
    whole = manifest([7])
    del whole.state[name]
    with pytest.raises(ValueError, match=name):
        check_state(whole, "it", ENGINE, POLICY)


def test_state_of_another_model_is_not_reported_as_damaged():
    """Its token ledger has other layers, too."""

    def refuse(saved, where):
        raise CheckpointError("another model. Fix: load another one", code="checkpoint-of-another-model")

    other = manifest([7], ledger=TokenLedger.empty({5: 2}).state_dict())
    engine: Any = SimpleNamespace(check=refuse)
    with raises("checkpoint-of-another-model"):
        check_state(other, "it", engine, POLICY)
