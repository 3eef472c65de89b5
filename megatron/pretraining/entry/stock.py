"""Megatron-LM's global objects, which exist once its arguments are parsed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from megatron import training


def get_args() -> Any:
    """Megatron-LM's arguments."""
    return training.get_args()


def get_timers() -> Any:
    """Megatron-LM's timers."""
    return training.get_timers()


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Gives attributes of Megatron-LM's modules or arguments other values meanwhile."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
