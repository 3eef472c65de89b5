"""Expected age of experts at a fault, if they are equally busy and saved in turn."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from moc.policy.pec_state import turn
from moc.policy.persist import persist_selection
from moc.policy.sequential import sequential_experts


class Ages(NamedTuple):
    """Ages of the newest versions of a layer's experts, relative to the newest checkpoint.

    Attributes:
        mean: mean over experts and checkpoints.
        oldest: maximum over experts and checkpoints.
    """

    mean: float
    oldest: int

    def times(self, iterations: int) -> Ages:
        """The ages in iterations, for checkpoints that many iterations apart."""
        return Ages(self.mean * iterations, self.oldest * iterations)


@cache
def ages(num_experts: int, k_snapshot: int, k_kept: int, every: int = 1, persist_every: int = 1) -> Ages:
    """Ages in checkpoints if experts are saved in turn, as by :class:`moc.policy.pec.Pec`.

    MoC-System, sections 3.2 and 5.1.

    Args:
        num_experts: N.
        k_snapshot: experts of each layer in a snapshot.
        k_kept: those of them that are kept: K_persist in storage, K_snapshot in memory.
        every: snapshots per kept one: 1 in memory.
        persist_every: snapshots per persisted one, which :func:`~moc.policy.pec_state.turn` compensates for.
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
