"""The error of jobs, faults and costs that cannot be simulated."""

from moc.errors import UserError


class SimulationError(UserError, ValueError):
    """What is to be simulated is impossible or incomplete; the message names the value and the remedy."""
