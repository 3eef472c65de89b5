"""What a run with one policy can make of what another one has saved."""

from __future__ import annotations

from collections.abc import Iterable

from moc.policy import POLICIES, Policy
from moc.recovery.sources import STORAGE, AvailableCheckpoint, RecoveryPath, recoveries


def refusal(held: Iterable[AvailableCheckpoint], policy: Policy, iteration: int = -1) -> str | None:
    """Why an exact policy must not go back behind newer snapshots of one that is not, and what to do.

    Args:
        held: the checkpoints that there are.
        policy: of the run.
        iteration: at which it would go on; -1 where it cannot.

    Returns:
        A sentence; None where there is no such thing.
    """
    newest = next(recoveries(held, policy.operators, exact=False), None) if policy.exact else None
    if newest is None or newest.iteration <= iteration:
        return None
    name = newest.base.policy
    if name not in POLICIES or POLICIES[name].exact:
        return None
    return (
        f"the snapshot of iteration {newest.iteration} was taken with --ckpt-policy {name}, so that experts in it are "
        f"older than the rest, and --ckpt-policy {policy.name} cannot go on from it: start once more with "
        f"--ckpt-policy {name} and end in good order (SIGTERM, or --exit-interval), which saves everything; then "
        "change the policy"
    )


def is_of(policy: Policy, way: RecoveryPath) -> bool:
    """Whether all of a way to go on is of a policy; what others have saved tells nothing of tokens."""
    return all(one.policy == policy.name for one in way.used())


def in_storage_alone(held: Iterable[AvailableCheckpoint], policy: Policy) -> bool:
    """Whether a run could go on from what its own policy has in storage."""
    stored = [one for one in held if one.tier == STORAGE]
    return any(is_of(policy, way) for way in recoveries(stored, policy.operators, policy.exact))
