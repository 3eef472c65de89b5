"""Numbers of snapshots in host memory, for allocating buffers and for predicting their size.

A policy with windows resumes from several snapshots together.  Memory then holds the newest complete window and the one
in progress, and storage may be reading another one.  Every other policy has windows of one snapshot.
"""

from __future__ import annotations

SPARE = 2
"""Buffers in addition to recovery's: one being filled, one being written to storage (MoC-System, section 5.2)."""


def spare_buffers(tier: str) -> int:
    """Returns the number of a rank's buffers beyond recovery's: with peers, other nodes copy from one more."""
    return SPARE + (tier == "peers")


def most_buffers(kept: int, window: int, spare: int, stores: bool) -> int:
    """Returns the maximum number of a rank's buffers where memory keeps the snapshots that recovery needs.

    Args:
        kept: snapshots that recovery needs, at most.
        window: snapshots of a window.
        spare: as :func:`spare_buffers`.
        stores: windows are also written to storage, which may take long to read one of them.
    """
    return most_copies(kept, spare) + (window - 1) * stores


def most_copies(kept: int, spare: int) -> int:
    """Returns the maximum number of a rank's snapshots in the memory of a node with copies; arguments as above."""
    return kept + spare


def kept_of_windows(window: int) -> int:
    """Returns how many snapshots recovery needs at most: a complete window, and all but the last of the next."""
    return 2 * window - 1


def reserved_bytes(count: int, full: float, snapshot: float | None) -> float:
    """Returns the bytes of the buffers of :func:`reserved_sizes`."""
    return full + (full if snapshot is None else snapshot) * (count - 1)


def reserved_sizes(count: int, full: int, snapshot: int | None) -> list[int]:
    """Returns the bytes of each buffer: one for a full snapshot, the others for ``snapshot`` (default: also full)."""
    return [full] + [full if snapshot is None else snapshot] * (count - 1)
