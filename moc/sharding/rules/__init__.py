"""Rules by name.  Every file in this directory is imported, so a new rule is a new file and nothing else."""

import importlib
import pkgutil

from moc.sharding.rules.registry import RULES, Rule, rule

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["RULES", "Rule", "rule"]
