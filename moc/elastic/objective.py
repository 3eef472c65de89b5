"""Predicts the time to train with a placement: the one objective for replica counts, groups and experts everywhere.

The busiest node determines the time of an iteration.  A loss that leaves an expert without a replica costs the return
to the newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

TOLERATED_IMBALANCE = 1.05
"""Work of the busiest node relative to the mean; less gains little, since loads change until the next plan."""

_MAX_LOST = 8  # nodes; more are too improbable to count


@dataclass(frozen=True)
class LossModel:
    """Losses of nodes.

    Attributes:
        mtbf_s: seconds between losses of nodes in the job.
        restore_s: seconds to return to the newest checkpoint, with the iterations to repeat.
        also_lost: probability that a lost node takes another one with it: a switch, or within the time of a recovery.
    """

    mtbf_s: float = 3600.0
    restore_s: float = 600.0
    also_lost: float = 0.1


def fatal_share(representatives: Sequence[int], nodes: int, losses: LossModel) -> float:
    """Returns the share of losses that leave an expert without a replica, by a union bound.

    Args:
        representatives: replicas of the first expert of each group: the group survives with it (appendix A.1).
        nodes: nodes that hold replicas.
        losses: how nodes are lost.
    """
    share, probability = 0.0, 1.0 - losses.also_lost
    for lost in range(1, min(nodes, _MAX_LOST) + 1):
        fatal = sum(comb(nodes - replicas, lost - replicas) for replicas in representatives if replicas <= lost)
        share += probability * min(1.0, fatal / comb(nodes, lost))
        probability *= losses.also_lost
    return share


def predicted_time(imbalance: float, representatives: Sequence[int], nodes: int, losses: LossModel) -> float:
    """Returns the time to train, relative to level work without losses.

    Args:
        imbalance: work of the busiest node relative to the mean.
        representatives: as in :func:`fatal_share`.
        nodes: as in :func:`fatal_share`.
        losses: how nodes are lost.
    """
    lost_time = losses.restore_s / losses.mtbf_s * fatal_share(representatives, nodes, losses)
    return max(imbalance, TOLERATED_IMBALANCE) * (1.0 + lost_time)
