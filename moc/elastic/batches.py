"""Which rank trains on which micro batch: the global batch is the same with any number of ranks."""

from __future__ import annotations


def rounds(micro_batches: int, ranks: int) -> int:
    """Micro batches that each rank runs, ghosts included."""
    return -(-micro_batches // ranks)


def micro_batches_of(rank: int, micro_batches: int, ranks: int) -> list[int | None]:
    """The micro batches of a rank, round by round: number g is on rank g mod D, in round g div D.

    Args:
        rank: among those that train on different samples; D or more helps these, with ghosts alone.
        micro_batches: of the global batch.
        ranks: D.

    Returns:
        Numbers within the global batch; None for a ghost: the rank takes part in what all do, without tokens.
    """
    if rank >= ranks:
        return [None] * rounds(micro_batches, ranks)
    numbers = range(rank, rounds(micro_batches, ranks) * ranks, ranks)
    return [number if number < micro_batches else None for number in numbers]


def speed(micro_batches: int, ranks: int, before: int) -> float:
    """Iterations in the time of one with ``before`` ranks, where micro batches take all the time."""
    return rounds(micro_batches, before) / rounds(micro_batches, ranks)
