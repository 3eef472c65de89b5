"""Registers sharding rules by name; imports every file in this directory, so that a new rule is one new file.

The built-in rules are in :mod:`moc.sharding.assignment`.
"""

import importlib
import pkgutil

from moc.sharding.rules.registry import RULES, Rule, rule

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["RULES", "Rule", "rule"]
