"""Changes of policy: what a run may use of another policy's snapshots."""

from __future__ import annotations

from collections.abc import Iterable

from moc.policy import POLICIES, Policy
from moc.recovery.sources import LIVE, STORAGE, AvailableCheckpoint, RecoveryPath, recoveries


def refusal(held: Iterable[AvailableCheckpoint], policy: Policy, iteration: int = -1) -> str | None:
    """Says why an exact policy cannot resume behind newer snapshots of an inexact one, and the remedy; None if it can.

    ``iteration`` is the one that it would resume from; -1 if there is none.
    """
    newest = next(recoveries(held, policy.operators, exact=False), None) if policy.exact else None
    if newest is None or newest.iteration <= iteration:
        return None
    name = newest.base.policy
    if name not in POLICIES or POLICIES[name].exact:
        return None
    return (
        f"the snapshot of iteration {newest.iteration} was taken with --ckpt-policy {name}, so that experts in it are "
        f"older than the rest, and --ckpt-policy {policy.name} cannot resume from it: start once more with "
        f"--ckpt-policy {name} and end in good order (SIGTERM, or --exit-interval), which saves everything; then "
        "change the policy"
    )


def is_of(policy: Policy, way: RecoveryPath) -> bool:
    """Whether a policy planned all checkpoints of a path; those of others say nothing of tokens."""
    return all(one.tier == LIVE or one.policy == policy.name for one in way.used())


def in_storage_alone(held: Iterable[AvailableCheckpoint], policy: Policy) -> bool:
    """Whether a run could resume from its own policy's checkpoints in storage."""
    stored = [one for one in held if one.tier == STORAGE]
    return any(is_of(policy, way) for way in recoveries(stored, policy.operators, policy.exact))
