"""Converts exceptions of installed policies to errors that name policy, method and line."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from moc.errors import UserError, raised
from moc.policy.errors import PolicyError
from moc.policy.plan import Policy, SnapshotPlan

_PLANS = {
    "plan": (SnapshotPlan, type(None)),
    "plan_for_storage": (SnapshotPlan, type(None)),
    "plan_as_due": (SnapshotPlan,),
    "everything": (SnapshotPlan,),
    "for_storage": (SnapshotPlan,),
}
"""Result types by method."""

_PASS: dict[str, tuple[type[Exception], ...]] = {
    "load_state_dict": (ValueError,),
    "loading": (ValueError,),
    "on_sizes": (ValueError, RuntimeError),  # its argument communicates, and recovery needs these errors
}
"""Exceptions allowed by a method's contract."""


def guard(kind: type[Policy]) -> None:
    """Wraps the interface methods that a class defines, or a base outside of this package.

    Users of the policy need no traceback, and the message has the line for its author.
    """
    for base in kind.__mro__[: kind.__mro__.index(Policy)]:
        if base.__module__.partition(".")[0] == __name__.partition(".")[0]:
            continue
        for name, found in list(vars(base).items()):
            if hasattr(Policy, name) and not name.startswith("__"):
                setattr(base, name, _guarded(found, name, kind.name))


def _guarded(found: Any, name: str, policy: str) -> Any:
    if isinstance(found, property):
        return property(_wrapped(found.fget, name, policy)) if found.fget else found
    if isinstance(found, classmethod):
        return classmethod(_wrapped(found.__func__, name, policy))
    return _wrapped(found, name, policy) if inspect.isfunction(found) else found


def _wrapped(method: Callable, name: str, policy: str) -> Callable:
    @functools.wraps(method)
    def call(*args, **kwargs):
        with _named(method, name, policy):
            result = method(*args, **kwargs)
            if not isinstance(result, _PLANS.get(name, object)):
                raise TypeError(f"it returns {type(result).__name__} in place of a SnapshotPlan")
            if name == "state_dict":
                json.dumps(result)  # raises TypeError
        return result

    @functools.wraps(method)
    def generate(*args, **kwargs):
        with _named(method, name, policy):
            yield from method(*args, **kwargs)

    return generate if inspect.isgeneratorfunction(method) else call


@contextmanager
def _named(method: Callable, name: str, policy: str) -> Iterator[None]:
    try:
        yield
    except (UserError, *_PASS.get(name, ())):
        raise
    except Exception as error:
        raise PolicyError(
            f"policy {policy} failed in {name}() ({raised(error, method)}). Fix: correct the policy, or choose another "
            "one with --ckpt-policy",
            code="policy-failed",
        ) from error
