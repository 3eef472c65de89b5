"""Rounds limits for messages so that the printed number is accepted."""

from __future__ import annotations

from decimal import ROUND_CEILING, Context, Decimal

_DIGITS = Context(prec=3, rounding=ROUND_CEILING)


def rounded_up(value: float, unit: float = 1e9) -> str:
    """Returns the smallest number of ``unit`` with three significant digits that is at least ``value`` (above 0)."""
    found = _DIGITS.create_decimal(Decimal(value) / Decimal(unit))
    while float(found) * unit < value:
        found = found.next_plus(_DIGITS)
    return f"{found:f}"
