"""Sharding rules by name.  Every file in this directory is imported: adding a rule means adding one file."""

import importlib
import pkgutil

from moc.sharding.rules.registry import RULES, Rule, rule

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["RULES", "Rule", "rule"]
