"""Defines the error for jobs, faults and costs that cannot be simulated."""

from moc.errors import UserError


class SimulationError(UserError, ValueError):
    """Impossible or incomplete simulation; the message names the value and the remedy."""
