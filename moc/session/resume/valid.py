"""Validates all non-tensor state of a snapshot before any of it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moc.files import decode
from moc.files.text import shown
from moc.policy import Policy
from moc.policy.interval import Interval
from moc.policy.partial import experts_by_layer
from moc.policy.token_ledger import TokenLedger
from moc.recovery.folds import RULES
from moc.session.auto import AutoState
from moc.session.engine import Engine
from moc.state.adam import Rules
from moc.state.record import Position
from moc.store.manifest import Manifest

_Updates: Any = decode.Count | None


def check_state(manifest: Manifest, where: str, engine: Engine, policy: Policy) -> None:
    """Validates the state in a manifest whose own fields are valid; changes nothing.

    Args:
        manifest: manifest of a snapshot, or of the part that a node has of it.
        where: name of the snapshot, for messages.
        engine: engine that would load the snapshot.
        policy: policy of the run, which loads only the state of a policy of the same name.

    Raises:
        ValueError: a value is missing, has another type or is impossible.
        CheckpointError: the snapshot belongs to another model or optimizer.
    """
    state = manifest.state
    decode.state(state, Position, "a run", every_field=True)
    _check_updates(manifest)
    if state.get("ledger"):
        _check_ledger(TokenLedger.from_state(state["ledger"]), manifest.iteration, policy)
    if state.get("auto"):
        AutoState.read(state["auto"])
    if RULES in state:
        Rules.from_plain(state[RULES])
    if manifest.policy == policy.name:
        for owner, stored in _policy_states(policy, state):
            owner.loading(stored)
    engine.check(state, where)


def _check_updates(manifest: Manifest) -> None:
    """Validates update counts of operators: at most the iterations, and the engine's count if it has one for all."""
    counted = {entry.step for entry in manifest.operators.values() if entry.step is not None}
    if max(counted, default=0) > manifest.iteration:
        raise ValueError(f"an operator has {max(counted)} updates after {manifest.iteration} iterations")
    if "optimizer_step" in manifest.state:
        known = decode.state(manifest.state["optimizer_step"], _Updates, "an optimizer")
        if known:  # 0 may be of a rank that owns no parameters
            counted.add(known)
        if len(counted) > 1:
            raise ValueError(f"operators and optimizer have different numbers of updates: {shown(sorted(counted))}")


def _policy_states(policy: Policy, state: Mapping[str, Any]) -> list[tuple[Policy | Interval, Mapping[str, Any]]]:
    """Returns the interval and the policy with their saved states, omitting those without a saved state."""
    both = ((policy.interval, state.get("interval")), (policy, state.get("policy_state")))
    return [(owner, stored) for owner, stored in both if stored]


def _check_ledger(ledger: TokenLedger, iteration: int, policy: Policy) -> None:
    experts = {layer: len(row) for layer, row in ledger.load.items()}
    if ledger.iteration != iteration or experts != experts_by_layer(policy.operators):
        raise ValueError("its token ledger is of another iteration or model")
