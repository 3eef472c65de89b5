"""Copies replicated state from one rank to another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
import xxhash

from moc.recovery.plan import RankCopy
from moc.state.detail import Detail
from moc.state.fragments import Fragment
from moc.state.interface import TrainingState


def pieces(state: TrainingState) -> dict[str, str]:
    """Returns, by operator, an ID of this rank's part: see :class:`moc.recovery.plan.JobInventory`."""
    return {operator: _name(fragments) for operator, fragments in _by_operator(state).items()}


def exchange(copies: Sequence[RankCopy], state: TrainingState, rank: int) -> int:
    """Sends and receives a plan's copies, one operator at a time; returns the bytes that this rank received.

    All ranks call it with the same copies.
    """
    held, taken = _by_operator(state), 0
    for copy in copies:
        if rank not in (copy.source, copy.target):
            continue
        fragments = held[copy.operator]
        packed = torch.cat([fragment.view.view(torch.uint8) for fragment in fragments])  # one message per operator
        if rank == copy.source:
            dist.send(packed, copy.target)
        else:
            dist.recv(packed, copy.source)
            values = packed.split([fragment.view.nbytes for fragment in fragments])
            for fragment, value in zip(fragments, values, strict=True):
                state.load(fragment, value.view(fragment.view.dtype))
            taken += packed.nbytes
    return taken


def _by_operator(state: TrainingState) -> dict[str, list[Fragment]]:
    held = defaultdict(list)
    for fragment in state.fragments(state.operators(), Detail.FULL):
        held[fragment.operator].append(fragment)
    return held


def _name(fragments: Sequence[Fragment]) -> str:
    parts = sorted((f.name, f.slot, f.region.offset, f.region.shape) for f in fragments)
    return xxhash.xxh3_64_hexdigest(repr(parts).encode())
