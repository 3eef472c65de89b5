"""Defines errors of settings, flags, states and plans of policies."""

from __future__ import annotations

from moc.errors import FIX, UserError


class PolicyError(UserError, ValueError):
    """A policy cannot work with its flags or arguments; the message names the value."""

    code = "policy-flags-conflict"


class PolicyImportError(UserError, ImportError):
    """A package that contains a policy cannot be imported."""


def refusal_of(policy: str, refused: str | Exception) -> PolicyError:
    """Returns the error of a refused setting: with the code of a ``UserError``, otherwise with the class's code."""
    cause, _, remedy = str(refused).partition(FIX)
    error = PolicyError(f"--ckpt-policy {policy}: {cause}. Fix: {remedy or 'change the flags that it names'}")
    error.code = refused.code if isinstance(refused, UserError) else error.code
    return error
