"""Errors of settings, flags, states and plans of policies."""

from __future__ import annotations

from moc.errors import UserError


class PolicyError(UserError, ValueError):
    """A policy cannot work with its flags or arguments; the message names the value."""

    code = "policy-invalid"


class PolicyImportError(UserError, ImportError):
    """A package that brings a policy cannot be imported."""
