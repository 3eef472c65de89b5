"""Decides which operators each iteration saves, with which state subset (checkpoint policies).

Imports every file in this directory, and every module that an installed package lists under the entry point
``moc.policies``. A new policy is a new file.
"""

import importlib
import pkgutil
import sys
from pathlib import Path

from moc.errors import with_code
from moc.files.decode import escape_line
from moc.policy.costs import PolicyCosts
from moc.policy.errors import PolicyImportError
from moc.policy.flags import FlagConflict, JobRequirement, JobShape, PolicyFlag, PolicyFlags
from moc.policy.interface import (
    Capability,
    Load,
    Policy,
    PolicyReport,
    RecoveryResponse,
    SnapshotPlan,
    SnapshotSchedule,
    StorageSchedule,
    add_requirements,
    check_plan,
    full_plan,
    recovers_exactly,
)
from moc.policy.interval import Every, Interval, IntervalTuner, ObservedIteration, Transfer, parse_interval
from moc.policy.registry import (
    AUTO,
    POLICIES,
    RegisteredPolicy,
    full_policy_name,
    import_policies,
    is_full_policy,
    is_partial_policy,
    is_window_policy,
    policy,
    policy_by_flag,
    policy_named,
    registered_policy,
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
try:
    import_policies()
except PolicyImportError as error:  # programs import this module before they can handle an error
    sys.exit(f"{Path(sys.argv[0]).name}: error: {escape_line(with_code(error))}")
