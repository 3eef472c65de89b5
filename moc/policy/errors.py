"""Defines errors of policies, and rounds limits for their messages."""

from __future__ import annotations

from decimal import ROUND_CEILING, Context, Decimal

from moc.errors import FIX, UserError


class PolicyError(UserError, ValueError):
    """A policy cannot work with its flags or arguments; the message names the value."""

    code = "policy-flags-conflict"


class PolicyImportError(UserError, ImportError):
    """A package that contains a policy cannot be imported."""


def policy_refusal(policy: str, refused: str | Exception) -> PolicyError:
    """Returns the error of a refused setting: with the code of a ``UserError``, otherwise with the class's code."""
    cause, _, remedy = str(refused).partition(FIX)
    error = PolicyError(f"--ckpt-policy {policy}: {cause}. Fix: {remedy or 'change the flags that it names'}")
    error.code = refused.code if isinstance(refused, UserError) else error.code
    return error


_DIGITS = Context(prec=3, rounding=ROUND_CEILING)


def rounded_up(value: float, unit: float = 1e9) -> str:
    """Returns the smallest number of ``unit`` with three significant digits that is at least ``value`` (above 0)."""
    rounded = _DIGITS.create_decimal(Decimal(value) / Decimal(unit))
    while float(rounded) * unit < value:
        rounded = rounded.next_plus(_DIGITS)
    return f"{rounded:f}"
