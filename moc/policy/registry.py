"""Where policies are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from moc.policy.plan import Policy

POLICIES: dict[str, type[Policy]] = {}

Kind = TypeVar("Kind", bound=type[Policy])


def policy(name: str) -> Callable[[Kind], Kind]:
    """Registers the class below it as the policy of that name."""

    def register(kind: Kind) -> Kind:
        if name in POLICIES:
            raise ValueError(f"there are two policies called {name}: rename one of them")
        kind.name = name
        POLICIES[name] = kind
        return kind

    return register


def policy_named(name: str) -> type[Policy]:
    """The policy of a name.

    Raises:
        ValueError: there is none; the message lists those that there are.
    """
    if name not in POLICIES:
        raise ValueError(f"there is no policy called {name}: choose one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
