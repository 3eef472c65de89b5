"""Computes lower bounds of any assignment, and balance of partial experts checkpointing (MoC, eqs. 8-9)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from moc.sharding.item import Item
from moc.sharding.layout import Layout


def ideal_bytes(items: Sequence[Item], layout: Layout) -> float:
    """Returns the bytes of the bottleneck rank if every byte could go to any rank of its pipeline stage.

    With one stage and a full checkpoint, this is (P_ne + P_e) (B_w + B_o) / D_dp: MoC's eq. 8 with D_dp in place of
    D_ep.  The two agree for one expert-parallel group; with several, each rank holds only 1 / D_dp of the optimizer
    state, and equal sharding of experts divides their weights likewise.
    """
    of_stage = [0] * layout.pp
    for item in items:
        of_stage[layout.stage(item.holders[0])] += item.nbytes
    return max(of_stage) * layout.pp / layout.world


def forced_bytes(items: Sequence[Item]) -> int:
    """Returns the maximum bytes that have one rank as only holder: a lower bound of every assignment's bottleneck."""
    load: Counter[int] = Counter()
    for item in items:
        if len(item.holders) == 1:
            load[item.holders[0]] += item.nbytes
    return max(load.values(), default=0)


def equation_8(non_expert: int, expert: int, weights: int, optimizer: int, dp: int, ep: int) -> float:
    """Returns MoC's eq. 8 as printed: the bytes that each rank ideally saves of a full checkpoint.

    Args:
        non_expert: P_ne, dense parameters.
        expert: P_e, parameters of experts.
        weights: B_w, bytes of weights per parameter.
        optimizer: B_o, bytes of optimizer state per parameter.
        dp: D_dp, data-parallel ranks.
        ep: D_ep, expert-parallel ranks.
    """
    return (non_expert + expert) * optimizer / ep + non_expert * weights / dp + expert * weights / ep


def pec_leaves_ranks_unequal(k: int, moe_layers: int, dp: int, ep: int) -> bool:
    """Returns whether the chosen experts cannot be sharded equally (MoC's eq. 9).

    Either they do not divide over expert-parallel ranks, or the experts of one such rank do not divide over the
    expert-parallel groups.

    Args:
        k: K_pec, experts saved in each layer.
        moe_layers: N_moe, layers with experts.
        dp: D_dp, data-parallel ranks.
        ep: D_ep, expert-parallel ranks.
    """
    return (k * moe_layers) % ep != 0 or (k * moe_layers // ep) % (dp // ep) != 0
