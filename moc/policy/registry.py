"""Registers policies by name, and guards the methods of policies from other packages."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, TypeVar

from moc.errors import UserError, raised
from moc.policy.costs import PolicyCosts
from moc.policy.errors import PolicyError, PolicyImportError
from moc.policy.flags import FlagValues, JobShape, PolicyFlag, PolicyFlags
from moc.policy.interface import (
    Capability,
    Full,
    Policy,
    PolicyReport,
    RecoveryResponse,
    SnapshotPlan,
    SnapshotSchedule,
    StorageSchedule,
)

_COMPONENTS = {
    "storage": StorageSchedule,
    "schedule": SnapshotSchedule,
    "report": PolicyReport,
    "recovery": RecoveryResponse,
}
"""Interfaces of a policy's components, by property."""

_RESULT_TYPES = {
    "plan": (SnapshotPlan, type(None)),
    "storage.plan": (SnapshotPlan, type(None)),
    "storage.part_of": (SnapshotPlan,),
    "schedule.plan_as_due": (SnapshotPlan,),
} | {name: (component,) for name, component in _COMPONENTS.items()}
"""Result types by method."""

_ALLOWED_EXCEPTIONS: dict[str, tuple[type[Exception], ...]] = {
    "loading": (ValueError,),
    "on_sizes": (ValueError, RuntimeError),  # its argument communicates, and recovery needs these errors
}
"""Exceptions allowed by a method's contract."""


def guard_methods(entry: RegisteredPolicy) -> None:
    """Wraps the interface methods that a policy, or its flags, costs and components, define outside of this package.

    Users of the policy need no traceback, and the message has the line for its author.
    """
    _guard_class(entry.policy_class, Policy, entry.name)
    _guard_class(type(entry.flags), PolicyFlags, entry.name)
    _guard_class(type(entry.costs), PolicyCosts, entry.name)


def _guard_class(kind: type, interface: type, policy: str, component: str = "") -> None:
    for base in kind.__mro__[: kind.__mro__.index(interface)]:
        if base.__module__.partition(".")[0] == __name__.partition(".")[0]:
            continue
        for name, member in list(vars(base).items()):
            if hasattr(interface, name) and not name.startswith("_"):
                setattr(base, name, _guarded(member, f"{component}{name}", policy))
        if interface is PolicyFlags:  # tables contain functions, which methods of this package call
            for name in ("conflicts_in", "unmet_requirements"):
                setattr(base, name, _guarded(getattr(base, name), name, policy))


def _guarded(member: Any, name: str, policy: str) -> Any:
    if isinstance(member, property):
        return property(_wrapped(member.fget, name, policy)) if member.fget else member
    if isinstance(member, classmethod):
        return classmethod(_wrapped(member.__func__, name, policy))
    return _wrapped(member, name, policy) if inspect.isfunction(member) else member


def _wrapped(method: Callable, name: str, policy: str) -> Callable:
    @functools.wraps(method)
    def call(*args, **kwargs):
        with _naming_errors(method, name, policy):
            result = method(*args, **kwargs)
            expected = _RESULT_TYPES.get(name, (object,))
            if not isinstance(result, expected):
                raise TypeError(f"it returns {type(result).__name__} in place of a {expected[0].__name__}")
            if name == "state_dict":
                json.dumps(result)  # raises TypeError
        if name in _COMPONENTS:
            _guard_component(type(result), name, policy)
        return result

    @functools.wraps(method)
    def generate(*args, **kwargs):
        with _naming_errors(method, name, policy):
            yield from method(*args, **kwargs)

    return generate if inspect.isgeneratorfunction(method) else call


@functools.cache
def _guard_component(kind: type, name: str, policy: str) -> None:
    _guard_class(kind, _COMPONENTS[name], policy, f"{name}.")


@contextmanager
def _naming_errors(method: Callable, name: str, policy: str) -> Iterator[None]:
    try:
        yield
    except (UserError, *_ALLOWED_EXCEPTIONS.get(name, ())):
        raise
    except Exception as error:
        raise PolicyError(
            f"policy {policy} failed in {name}() ({raised(error, method)}). Fix: correct the policy, or choose another "
            "one with --ckpt-policy",
            code="policy-failed",
        ) from error


AUTO = "auto"
"""Instead of a policy name: policy and settings are chosen from measurements."""

ENTRY_POINTS = "moc.policies"
"""Entry-point group with the modules of packages' policies."""

Kind = TypeVar("Kind", bound=type[Policy])


@dataclass(frozen=True)
class RegisteredPolicy:
    """A policy, with everything that is known before it is built for a model.

    Attributes:
        requires: capabilities that the policy needs with any settings.
    """

    name: str
    policy_class: type[Policy]
    flags: PolicyFlags
    costs: PolicyCosts
    requires: frozenset[Capability]

    @property
    def is_exact(self) -> bool:
        """Whether a run resumed from its snapshots is bit-identical to one without the failure."""
        return Capability.OLDER_EXPERTS not in self.requires

    @property
    def can_replay(self) -> bool:
        """Whether resuming may replay iterations with some operators frozen."""
        return Capability.REPLAY in self.requires

    def settings(self, flags: FlagValues, job: JobShape) -> dict[str, Any]:
        """Returns the policy fields that flags and job determine.

        Field ``k`` of policy ``pec`` is set by flag ``pec_k`` if that exists, otherwise by the job's value of that
        name. :meth:`PolicyFlags.settings` has the exceptions.
        """
        every, interval = flags.persist_interval, flags.snapshot_interval
        values = {
            "ep": job.ep,
            "stages": job.stages,
            "mtbf_s": flags.mtbf_s,
            "one_level": flags.ckpt_tier == "disk",
            "persist_every": every // int(interval) if every and interval.isdecimal() else 1,
        }
        values |= {spec.name.removeprefix(f"{self.name}_"): getattr(flags, spec.name) for spec in self.flags.specs}
        fields = {field.name for field in dataclasses.fields(self.policy_class)}
        return {name: value for name, value in values.items() if name in fields} | self.flags.settings(flags, job)


POLICIES: dict[str, RegisteredPolicy] = {}


def policy(
    name: str,
    *,
    flags: PolicyFlags | None = None,
    costs: PolicyCosts | None = None,
    requires: Iterable[Capability] = (),
) -> Callable[[Kind], Kind]:
    """Returns a decorator that registers a class as the policy of that name.

    Args:
        name: value of ``--ckpt-policy``.
        flags: the policy's own flags; by default none.
        costs: its candidate settings and their prices; by default the prices of full snapshots.
        requires: capabilities that it needs with any settings; replay implies windows.

    Raises:
        ValueError: the name is taken or invalid, the class is no dataclass or lacks ``plan``, or a flag lacks the
            policy's prefix or its field.
    """

    def register(kind: Kind) -> Kind:
        if problem := _problem_of_requirements(name, kind):
            raise problem
        required = kind.requires.union(requires)
        if Capability.REPLAY in required:
            required |= {Capability.WINDOWS}
        if Capability.OLDER_EXPERTS in required:
            required |= {Capability.TOKEN_COUNTS}
        entry = RegisteredPolicy(name, kind, flags or PolicyFlags(), costs or PolicyCosts(), required)
        _check(entry)
        kind.name, kind.requires = name, required
        POLICIES[name] = entry
        return kind

    return register


_MOVED = {  # methods of policies in earlier releases, which would be ignored silently
    "at_risk": "report.at_risk",
    "begin_anew": "schedule.restart_window",
    "fault_cost": "report.fault_cost",
    "for_storage": "storage.part_of",
    "gauges": "report.gauges",
    "makes_up": "recovery.capacity_boost",
    "on_inventory": "storage.on_inventory",
    "on_persisted": "storage.on_write_ended",
    "on_recovery": "recovery.on_recovery",
    "on_resume": "recovery.on_resume",
    "on_stored": "storage.on_write_begun",
    "plan_for_storage": "storage.plan",
    "remarks": "report.remarks",
    "storage_lost": "storage.on_full_snapshot_lost",
    "stores": "storage.needs",
    "under_way": "schedule.current_window",
}


def _check(entry: RegisteredPolicy) -> None:
    name, kind = entry.name, entry.policy_class
    if problem := _problem_of_name(name) or _problem_of_class(name, kind):
        raise problem
    fields = {field.name for field in dataclasses.fields(kind)}
    maps_flags = type(entry.flags).settings is not PolicyFlags.settings
    for flag in entry.flags.specs:
        if problem := _problem_of_flag(name, flag, None if maps_flags else fields):
            raise problem


def _problem_of_requirements(name: str, kind: type[Policy]) -> PolicyError | None:
    if not isinstance(kind.requires, frozenset):
        return PolicyError(
            f"policy {name} defines requires as a {type(kind.requires).__name__}. Fix: pass requires to @policy, and "
            "call add_requirements() in __post_init__ for settings",
            code="policy-class-invalid",
        )
    return None


def _problem_of_name(name: str) -> PolicyError | None:
    if name in POLICIES:
        return PolicyError(
            f"there are two policies called {name}. Fix: rename one of them", code="policy-class-invalid"
        )
    if name == AUTO or not re.fullmatch("[a-z][a-z0-9]*", name):
        return PolicyError(
            f"a policy cannot be called {name}. Fix: set lower-case letters and digits, but not {AUTO}",
            code="policy-class-invalid",
        )
    return None


def _problem_of_class(name: str, kind: type[Policy]) -> PolicyError | None:
    if "__dataclass_fields__" not in vars(kind):
        return PolicyError(
            f"policy {name} is no dataclass. Fix: put @dataclass(frozen=True) below @policy",
            code="policy-class-invalid",
        )
    if missing := sorted(kind.__abstractmethods__):
        return PolicyError(f"policy {name} lacks {', '.join(missing)}. Fix: define it", code="policy-class-invalid")
    if moved := sorted(_MOVED.keys() & vars(kind).keys()):
        return PolicyError(
            f"policy {name} defines {moved[0]}, which no run calls. Fix: define {_MOVED[moved[0]]} of a component",
            code="policy-class-invalid",
        )
    return None


def _problem_of_flag(name: str, flag: PolicyFlag, fields: Collection[str] | None) -> PolicyError | None:
    if not flag.name.startswith(f"{name}_"):
        return PolicyError(
            f"flag {flag.name} of policy {name} does not begin with {name}_. Fix: rename it",
            code="policy-class-invalid",
        )
    if flag.value_type not in (bool, int, float, str):
        return PolicyError(
            f"flag {flag.name} of policy {name} is of type {flag.value_type.__name__}. Fix: make it bool, int, float "
            "or str",
            code="policy-class-invalid",
        )
    field = flag.name.removeprefix(f"{name}_")
    if fields is not None and field not in fields:
        return PolicyError(
            f"flag {flag.name} of policy {name} has no effect. Fix: add a field {field}, or settings()",
            code="policy-class-invalid",
        )
    return None


def import_policies() -> None:
    """Imports the modules listed under the entry point ``moc.policies``, which register their policies.

    Raises:
        PolicyImportError: a module cannot be imported; ignoring it could silently run without the requested policy.
    """
    for entry_point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        is_new, policies_before = entry_point.module not in sys.modules, set(POLICIES)
        try:
            importlib.import_module(entry_point.module)
            added = POLICIES.keys() - policies_before
            if is_new and not added:
                raise ValueError("it registers no policy")
            for name in added:
                guard_methods(POLICIES[name])
        except UserError as error:
            raise PolicyImportError(f"the policies of {entry_point.module}: {error}", code=error.code) from error
        except Exception as error:
            raise PolicyImportError(
                f"the policies of {entry_point.module}, which an installed package lists as {ENTRY_POINTS}, cannot be "
                f"imported ({type(error).__name__}: {error}). Fix: repair the package or uninstall it",
                code="policy-module-broken",
            ) from error


def policy_by_flag() -> dict[str, RegisteredPolicy]:
    """Returns the policy that each policy flag belongs to."""
    return {flag.name: entry for entry in POLICIES.values() for flag in entry.flags.specs}


def registered_policy(name: str) -> RegisteredPolicy:
    """Returns the policy of a name, with its flags and costs.

    Raises:
        ValueError: no policy has this name; the message lists all names.
    """
    if name not in POLICIES:
        raise PolicyError(
            f"there is no policy called {name}. Fix: choose one of {', '.join(sorted(POLICIES))}",
            code="value-not-a-choice",
        )
    return POLICIES[name]


def policy_named(name: str) -> type[Policy]:
    """Returns the class of a policy.

    Raises:
        ValueError: as :func:`registered_policy`.
    """
    return registered_policy(name).policy_class


def full_policy_name() -> str:
    """Returns the name of a policy whose snapshots each have the full model, without any flags."""
    return next(name for name in POLICIES if is_full_policy(name) and not POLICIES[name].flags.specs)


def is_full_policy(name: str | None) -> bool:
    """Returns whether each snapshot of a policy has the full model; False for a policy that is not installed."""
    entry = None if name is None else POLICIES.get(name)
    return entry is not None and entry.is_exact and Capability.WINDOWS not in entry.requires


def is_partial_policy(name: str | None) -> bool:
    """Returns whether experts may be in older snapshots of a policy; False for a policy that is not installed."""
    entry = None if name is None else POLICIES.get(name)
    return entry is not None and not entry.is_exact


def is_window_policy(name: str) -> bool:
    """Returns whether a window of snapshots forms one checkpoint; False for a policy that is not installed."""
    entry = POLICIES.get(name)
    return entry is not None and Capability.WINDOWS in entry.requires


policy("full")(Full)
