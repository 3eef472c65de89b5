"""What a rule is, and where it is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from moc.sharding.item import Item

Rule = Callable[[Sequence[Item], Mapping[int, int]], Sequence[int]]
"""From items, and the bytes that each rank already has to save, to the rank that saves each of the items.

Every rank computes the rule by itself, so the result follows from the arguments alone, and ties are broken the same
way everywhere.  A rank that is missing in the mapping has nothing to save yet.
"""

RULES: dict[str, Rule] = {}


def rule(name: str) -> Callable[[Rule], Rule]:
    """Registers the function below it as the rule of that name."""

    def register(function: Rule) -> Rule:
        if name in RULES:
            raise ValueError(f"there are two sharding rules called {name}")
        RULES[name] = function
        return function

    return register
