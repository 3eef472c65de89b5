"""Registers policies by name, and guards the methods of policies from other packages."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any, TypeVar

from moc.errors import UserError, raised
from moc.policy.errors import PolicyError, PolicyImportError
from moc.policy.plan import Policy, SnapshotPlan

_RESULT_TYPES = {
    "plan": (SnapshotPlan, type(None)),
    "plan_for_storage": (SnapshotPlan, type(None)),
    "plan_as_due": (SnapshotPlan,),
    "everything": (SnapshotPlan,),
    "for_storage": (SnapshotPlan,),
}
"""Result types by method."""

_ALLOWED_EXCEPTIONS: dict[str, tuple[type[Exception], ...]] = {
    "load_state_dict": (ValueError,),
    "loading": (ValueError,),
    "on_sizes": (ValueError, RuntimeError),  # its argument communicates, and recovery needs these errors
}
"""Exceptions allowed by a method's contract."""


def guard_methods(kind: type[Policy]) -> None:
    """Wraps the interface methods that a class defines, or a base outside of this package.

    Users of the policy need no traceback, and the message has the line for its author.
    """
    for base in kind.__mro__[: kind.__mro__.index(Policy)]:
        if base.__module__.partition(".")[0] == __name__.partition(".")[0]:
            continue
        for name, found in list(vars(base).items()):
            if hasattr(Policy, name) and not name.startswith("__"):
                setattr(base, name, _guarded(found, name, kind.name))


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
            if not isinstance(result, _RESULT_TYPES.get(name, object)):
                raise TypeError(f"it returns {type(result).__name__} in place of a SnapshotPlan")
            if name == "state_dict":
                json.dumps(result)  # raises TypeError
        return result

    @functools.wraps(method)
    def generate(*args, **kwargs):
        with _naming_errors(method, name, policy):
            yield from method(*args, **kwargs)

    return generate if inspect.isgeneratorfunction(method) else call


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
"""Entry-point group in which packages list the modules of their policies."""

POLICIES: dict[str, type[Policy]] = {}

Kind = TypeVar("Kind", bound=type[Policy])


def policy(name: str) -> Callable[[Kind], Kind]:
    """Returns a decorator that registers a class as the policy of that name.

    Raises:
        ValueError: the name is taken or invalid, the class is no dataclass or lacks ``plan``, or a flag lacks the
            policy's prefix or its field.
    """

    def register(kind: Kind) -> Kind:
        if name in POLICIES:
            raise PolicyError(
                f"there are two policies called {name}. Fix: rename one of them",
                code="policy-class-invalid",
            )
        if name == AUTO or not re.fullmatch("[a-z][a-z0-9]*", name):
            raise PolicyError(
                f"a policy cannot be called {name}. Fix: take lower-case letters and digits, but not {AUTO}",
                code="policy-class-invalid",
            )
        for flag in kind.flags:
            if not flag.name.startswith(f"{name}_"):
                raise PolicyError(
                    f"flag {flag.name} of policy {name} does not begin with {name}_. Fix: rename it",
                    code="policy-class-invalid",
                )
        _check(kind, name)
        kind.name = name
        kind.windows = kind.windows or kind.replays
        POLICIES[name] = kind
        return kind

    return register


def _check(kind: type[Policy], name: str) -> None:
    if "__dataclass_fields__" not in vars(kind):
        raise PolicyError(
            f"policy {name} is no dataclass. Fix: put @dataclass(frozen=True) below @policy",
            code="policy-class-invalid",
        )
    if lacking := sorted(kind.__abstractmethods__):
        raise PolicyError(
            f"policy {name} lacks {', '.join(lacking)}. Fix: define it",
            code="policy-class-invalid",
        )
    fields = {field.name for field in dataclasses.fields(kind)}
    maps_flags = any("settings" in vars(base) for base in kind.__mro__[: kind.__mro__.index(Policy)])
    for flag in kind.flags:
        if flag.value_type not in (bool, int, float, str):
            raise PolicyError(
                f"flag {flag.name} of policy {name} is of type {flag.value_type.__name__}. Fix: make it bool, int, "
                "float or str",
                code="policy-class-invalid",
            )
        if not maps_flags and (field := flag.name.removeprefix(f"{name}_")) not in fields:
            raise PolicyError(
                f"flag {flag.name} of policy {name} has no effect. Fix: add a field {field}, or settings()",
                code="policy-class-invalid",
            )


def import_policies() -> None:
    """Imports the modules listed under the entry point ``moc.policies``, which register their policies.

    Raises:
        PolicyImportError: a module cannot be imported; ignoring it could silently run without the requested policy.
    """
    for entry_point in sorted(entry_points(group=ENTRY_POINTS), key=lambda found: found.name):
        is_new, known = entry_point.module not in sys.modules, set(POLICIES)
        try:
            importlib.import_module(entry_point.module)
            added = POLICIES.keys() - known
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


def policy_by_flag() -> dict[str, type[Policy]]:
    """Returns the policy that each policy flag belongs to."""
    return {flag.name: kind for kind in POLICIES.values() for flag in kind.flags}


def policy_named(name: str) -> type[Policy]:
    """Returns the policy of a name.

    Raises:
        ValueError: no policy has this name; the message lists all names.
    """
    if name not in POLICIES:
        raise PolicyError(
            f"there is no policy called {name}. Fix: choose one of {', '.join(sorted(POLICIES))}",
            code="value-not-a-choice",
        )
    return POLICIES[name]


def is_full_policy(name: str | None) -> bool:
    """Returns whether each snapshot of a policy has the full model; False for a policy that is not installed."""
    kind = None if name is None else POLICIES.get(name)
    return kind is not None and kind.exact and not kind.windows


def is_partial_policy(name: str | None) -> bool:
    """Returns whether experts may be in older snapshots of a policy; False for a policy that is not installed."""
    kind = None if name is None else POLICIES.get(name)
    return kind is not None and not kind.exact


def is_window_policy(name: str) -> bool:
    """Returns whether a window of snapshots forms one checkpoint; False for a policy that is not installed."""
    kind = POLICIES.get(name)
    return kind is not None and kind.windows
