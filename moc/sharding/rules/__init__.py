"""The registry of sharding rules; imports every file in this directory, so that a new rule is one new file.

The built-in rules are in :mod:`moc.sharding.assignment`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moc.errors import UserError

Rule = Callable[[Sequence[Any], Mapping[int, int]], Sequence[int]]
"""Function from items (:class:`moc.sharding.SaveItem`), and the bytes already assigned to each rank, to the rank that
saves each item.

Every rank computes the rule itself, so the result must depend only on the arguments, with ties broken identically on
all ranks.  A rank missing from the mapping has no bytes assigned yet.
"""

RULES: dict[str, Rule] = {}


class RuleError(UserError, ValueError):
    """Sharding rule that cannot be registered."""


def rule(name: str) -> Callable[[Rule], Rule]:
    """Returns a decorator that registers a function as the rule of this name."""

    def register(function: Rule) -> Rule:
        if name in RULES:
            raise RuleError(
                f"there are two sharding rules called {name}. Fix: rename one of them",
                code="sharding-rule-broken",
            )
        RULES[name] = function
        return function

    return register


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
