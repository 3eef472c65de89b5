"""Checkpoint policies: which operators an iteration saves, and at which detail.

Every file in this directory is imported, and so is every module that an installed package lists under the entry point
``moc.policies``: adding a policy means adding one file.
"""

import importlib
import pkgutil

from moc.policy.flags import JobShape, PolicyFlag
from moc.policy.interval import Every, Interval, IntervalTuner, Observed, Transfer, interval_named
from moc.policy.plan import Load, Policy, SnapshotPlan
from moc.policy.registry import (
    AUTO,
    POLICIES,
    import_policies,
    is_of_everything,
    is_of_newest_experts,
    is_of_windows,
    owners,
    policy,
    policy_named,
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
import_policies()

__all__ = [
    "AUTO",
    "POLICIES",
    "Every",
    "Interval",
    "IntervalTuner",
    "JobShape",
    "Load",
    "Observed",
    "Policy",
    "PolicyFlag",
    "SnapshotPlan",
    "Transfer",
    "interval_named",
    "is_of_everything",
    "is_of_newest_experts",
    "is_of_windows",
    "owners",
    "policy",
    "policy_named",
]
