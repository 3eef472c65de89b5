"""Finds gradient chains in a node's memory and names the files of single operators; without torch.

MoEtion (section 5.2) saves an expert's gradients instead of its state. A *chain* is a state, its base, and the
gradients of all later iterations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from moc.recovery.sources import AvailableCheckpoint
from moc.state.operators import Detail
from moc.store.storage import LocalStorage
from moc.store.store import SUFFIX, Store

_UPDATED = f".folded{SUFFIX}"


class Chain(NamedTuple):
    """An expert's base, and the last iteration whose gradients follow it without a gap."""

    operator: str
    base: int
    until: int


def operator_file_name(name: str) -> str:
    """Returns the name of the file with one operator, copied out of a snapshot."""
    return f"{name}{SUFFIX}"


def updated_file_name(name: str) -> str:
    """Returns the name of the file with an operator's base after its gradients were applied."""
    return f"{name}{_UPDATED}"


def is_operator_file(file: str, operators: Collection[str]) -> bool:
    """Returns whether a file contains one of these operators."""
    return file.removesuffix(_UPDATED if file.endswith(_UPDATED) else SUFFIX) in operators


def updated_store(store: Store) -> Store:
    """Returns the store where a node's background optimizer commits new bases of the snapshots in a store."""
    return Store(LocalStorage(f"{store.storage.name}/folded", in_memory=True))


def applicable_chains(checkpoints: Iterable[AvailableCheckpoint], experts: Collection[str], least: int) -> list[Chain]:
    """Returns the chains with at least ``least`` gradients, the longest first.

    Args:
        checkpoints: snapshots, each reduced to the experts that were copied out of it.
        experts: operators whose gradients may be applied.
        least: number of gradients.
    """
    details = {checkpoint.iteration: checkpoint.operators for checkpoint in checkpoints}
    chains = []
    for name in sorted(experts):
        base = max((i for i, operators in details.items() if operators.get(name) == Detail.FULL.value), default=None)
        if base is None:
            continue
        until = base
        while details.get(until + 1, {}).get(name) == Detail.GRAD.value:
            until += 1
        if until - base >= least:
            chains.append(Chain(name, base, until))
    return sorted(chains, key=lambda chain: chain.base - chain.until)
