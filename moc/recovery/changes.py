"""Decides which snapshots of another policy a run may use."""

from __future__ import annotations

from collections.abc import Iterable

from moc.policy import POLICIES, Policy, recovers_exactly
from moc.recovery.sources import LIVE, STORAGE, AvailableCheckpoint, RecoveryPath, recoveries
from moc.store.errors import CheckpointError


def refusal(held: Iterable[AvailableCheckpoint], policy: Policy, iteration: int = -1) -> CheckpointError | None:
    """Returns the error of an exact policy that cannot resume because newer snapshots are inexact; None if it can.

    ``iteration`` is the one that it would resume from; -1 if there is none.
    """
    newest = next(recoveries(held, policy.operators, exact=False), None) if recovers_exactly(policy) else None
    if newest is None or newest.iteration <= iteration:
        return None
    name = newest.base.policy
    if name not in POLICIES or POLICIES[name].is_exact:
        return None
    return CheckpointError(
        f"--ckpt-policy {policy.name} cannot resume from the snapshot of iteration {newest.iteration}: --ckpt-policy "
        f"{name} took it, with experts older than the rest. Fix: start once more with --ckpt-policy {name}, end the "
        "job with SIGTERM or --exit-interval, which saves everything, and then change the policy",
        code="policy-change-refused",
    )


def is_of(policy: Policy, way: RecoveryPath) -> bool:
    """Returns whether a policy planned all checkpoints of a path, except survivor state.

    Other policies' checkpoints have no token counts for this one.
    """
    return all(one.tier == LIVE or one.policy == policy.name for one in way.used())


def in_storage_alone(held: Iterable[AvailableCheckpoint], policy: Policy) -> bool:
    """Returns whether a run could resume from its own policy's checkpoints in storage."""
    stored = [one for one in held if one.tier == STORAGE]
    return any(is_of(policy, way) for way in recoveries(stored, policy.operators, recovers_exactly(policy)))
