"""What workers of a test's world do that choose their policy: from few policies, and until they die."""

from __future__ import annotations

from moc.session import auto as auto_policy
from tests.integration import bodies, pec_bodies


def train(flags: dict, policy: str) -> dict:
    """As ``bodies.train``, where one policy alone can be chosen."""
    auto_policy.NAMES = (policy,)
    return bodies.train(flags)


def die_after(flags: dict, iteration: int, policy: str) -> None:
    """As ``pec_bodies.die_after``, where one policy alone can be chosen."""
    auto_policy.NAMES = (policy,)
    pec_bodies.die_after(flags, iteration)
