"""Numbers of snapshots in host memory: for the buffers that are allocated, and for predictions of their size.

A policy with windows resumes from several snapshots together.  Memory then holds the newest complete window and the one
under way, and storage may read another one.  Every other policy has windows of one snapshot.
"""

from __future__ import annotations

SPARE = 2
"""Buffers in addition to recovery's: one to copy into, one being written to storage (MoC-System, section 5.2)."""


def spare_buffers(tier: str) -> int:
    """Buffers of a rank in addition to recovery's: with peers, other nodes copy from one more."""
    return SPARE + (tier == "peers")


def most_buffers(kept: int, window: int, spare: int, stores: bool) -> int:
    """Maximum number of a rank's buffers where memory keeps what recovery needs.

    Args:
        kept: snapshots that recovery needs, at most.
        window: snapshots of a window.
        spare: as :func:`spare_buffers`.
        stores: windows also go to storage, which may read one of them for long.
    """
    return most_copies(kept, spare) + (window - 1) * stores


def most_copies(kept: int, spare: int) -> int:
    """Maximum number of a rank's snapshots in the memory of a node that keeps copies; arguments as above."""
    return kept + spare


def kept_of_windows(window: int) -> int:
    """Snapshots that recovery needs, at most, if windows supersede each other: a complete one, and most of the next."""
    return 2 * window - 1


def reserved_bytes(count: int, full: float, snapshot: float | None) -> float:
    """Bytes of the buffers of :func:`reserved_sizes`."""
    return full + (full if snapshot is None else snapshot) * (count - 1)


def reserved_sizes(count: int, full: int, snapshot: int | None) -> list[int]:
    """Bytes of each buffer: one for a full snapshot, and others for ``snapshot`` bytes, by default a full one, too."""
    return [full] + [full if snapshot is None else snapshot] * (count - 1)
