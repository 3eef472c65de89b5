"""Errors of the distribution of experts and optimizer state over nodes."""

from __future__ import annotations

from moc.errors import UserError


class ElasticError(UserError, ValueError):
    """Experts or optimizer state cannot be distributed as requested, or a stored distribution is invalid."""
