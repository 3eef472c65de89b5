"""Simulates the costs of checkpoints, failures and recovery by policy, for clusters that are not available."""

from moc.errors import UserError


class SimulationError(UserError, ValueError):
    """Impossible or incomplete simulation; the message names the value and the remedy."""
