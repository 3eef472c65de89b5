"""How old experts are when a fault comes, where they are equally busy and saved in turn."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from moc.policy.pec_state import turn
from moc.policy.persist import persist_selection
from moc.policy.sequential import sequential_experts


class Ages(NamedTuple):
    """Of the newest versions of a layer's experts, against the newest checkpoint.

    Attributes:
        mean: over experts and checkpoints.
        oldest: at most.
    """

    mean: float
    oldest: int

    def times(self, iterations: int) -> Ages:
        """The same in iterations, of which so many are between two checkpoints."""
        return Ages(self.mean * iterations, self.oldest * iterations)


@cache
def ages(num_experts: int, k_snapshot: int, k_kept: int, every: int = 1, persist_every: int = 1) -> Ages:
    """In checkpoints, as :class:`moc.policy.pec.Pec` selects experts in turn (MoC-System, sections 3.2 and 5.1).

    Args:
        num_experts: N.
        k_snapshot: experts of each layer in a snapshot.
        k_kept: those of them that are kept: K_persist in storage, all in memory.
        every: of so many snapshots one is kept: 1 in memory.
        persist_every: of so many snapshots one goes to storage, which the turn makes up for.
    """
    period, kept = num_experts // math.gcd(num_experts, k_snapshot), [0] * num_experts
    rounds, total, oldest = 4 * num_experts, 0, 0
    for checkpoint in range(1, 2 * rounds + 1):
        number = turn(checkpoint * every, period, persist_every)
        snapshot = sequential_experts(number, 0, k_snapshot, num_experts, 1)
        for expert in persist_selection({0: snapshot}, {0: kept}, k_kept, 1)[0]:
            kept[expert] = checkpoint
        if checkpoint > rounds:
            total += sum(checkpoint - when for when in kept)
            oldest = max(oldest, checkpoint - min(kept))
    return Ages(total / rounds / num_experts, oldest)
