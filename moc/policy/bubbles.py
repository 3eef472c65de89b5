"""Estimates the bubbles of a pipeline (MoEtion, section 5.3)."""

from __future__ import annotations


def bubble_share(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Returns the share of forward and backward that a stage waits, with the 1F1B schedule.

    A stage computes for ``micro_batches (t_f + t_b)`` and waits for ``t_bubble = (stages - 1) (t_f + t_b) / chunks``.
    ``t_f`` and ``t_b`` are the times of a micro batch on all chunks of a stage.

    Args:
        stages: pipeline stages.
        micro_batches: micro batches of an iteration.
        chunks: virtual stages of each worker (interleaved schedule).
    """
    bubble = (stages - 1) / chunks
    return bubble / (micro_batches + bubble)
