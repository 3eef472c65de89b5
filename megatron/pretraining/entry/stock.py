"""Megatron-LM's global objects, which exist once its arguments are parsed."""

from __future__ import annotations

from typing import Any

from megatron import training


def get_args() -> Any:
    """Megatron-LM's arguments."""
    return training.get_args()


def get_timers() -> Any:
    """Megatron-LM's timers."""
    return training.get_timers()
