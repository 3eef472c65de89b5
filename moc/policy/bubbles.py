"""Estimates the bubbles of a pipeline (MoEtion, section 5.3)."""

from __future__ import annotations


def bubble_share(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Share of forward and backward for which a stage waits, with the 1F1B schedule.

    ``t_bubble = (stages - 1) (t_f + t_b) / chunks``, with ``t_f`` and ``t_b`` of a micro batch on all chunks of a
    stage, which computes for ``micro_batches (t_f + t_b)``.

    Args:
        stages: pipeline stages.
        micro_batches: of an iteration.
        chunks: virtual stages of each worker (interleaved schedule).
    """
    bubble = (stages - 1) / chunks
    return bubble / (micro_batches + bubble)
