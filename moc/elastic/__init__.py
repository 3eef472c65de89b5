"""Places expert replicas and dispatches tokens on a changing number of nodes (Lazarus).

Pure functions of loads and active nodes, without torch or communication: all ranks compute the same results.
``docs/explanation/lazarus.md`` describes the paper and the corrections of its rules.
"""

from __future__ import annotations

from moc.errors import UserError


class ElasticError(UserError, ValueError):
    """Experts or optimizer state cannot be distributed as requested, or a stored distribution is invalid."""
