"""The sparse window: over how many iterations the state is spread so that each part hides (MoEvement, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moc.simulate.sizes import OperatorSize


class Window(NamedTuple):
    """What :func:`find_window_size` finds.

    Attributes:
        length: W_sparse, iterations.
        active: operators that each of them saves in full.
    """

    length: int
    active: int


def find_window_size(sizes: Sequence[OperatorSize], iteration_s: float, bandwidth: float) -> Window:
    """The shortest window whose snapshots hide behind an iteration.

    Algorithm 1 counts operators; here they keep their order and their sizes, and the first snapshot of a window, which
    holds the compute weights of all that follow, is the one that must fit.

    Args:
        sizes: of the operators on one rank.
        iteration_s: seconds that a snapshot may take.
        bandwidth: bytes per second from the device to host memory.

    Raises:
        ValueError: there is no operator.
    """
    if not sizes:
        raise ValueError("a window needs operators: there are none")
    full, compute = sum(size.full for size in sizes), sum(size.compute for size in sizes)
    count = len(sizes)
    active = count
    while active > 2:
        frozen = count - active
        snapshot = (full * active + compute * frozen) / count
        if snapshot <= bandwidth * iteration_s:
            break
        active -= 1
    return Window(-(-count // active), active)


def window_bytes(sizes: Sequence[OperatorSize], window: int) -> float:
    """Bytes of a snapshot in the mean over a window: each operator once in full, compute weights until then."""
    full, compute = sum(size.full for size in sizes), sum(size.compute for size in sizes)
    return full / window + compute * (window - 1) / (2 * window)


def first_bytes(sizes: Sequence[OperatorSize], window: int) -> float:
    """Bytes of the largest snapshot of a window: its first."""
    full, compute = sum(size.full for size in sizes), sum(size.compute for size in sizes)
    return full / window + compute * (window - 1) / window
