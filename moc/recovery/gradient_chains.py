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

_FOLDED = f".folded{SUFFIX}"


class Chain(NamedTuple):
    """An expert's base, and the last iteration whose gradients follow it without a gap."""

    operator: str
    base: int
    until: int


def file_of_operator(name: str) -> str:
    """Returns the name of the file with one operator, carried out of a snapshot."""
    return f"{name}{SUFFIX}"


def file_of_folded(name: str) -> str:
    """Returns the name of the file with an operator's base after its gradients were applied."""
    return f"{name}{_FOLDED}"


def is_of_operator(file: str, operators: Collection[str]) -> bool:
    """Returns whether a file contains one of these operators."""
    return file.removesuffix(_FOLDED if file.endswith(_FOLDED) else SUFFIX) in operators


def place_of_folded(store: Store) -> Store:
    """Returns the store where the folder of a node commits new bases of the snapshots in a store."""
    return Store(LocalStorage(f"{store.storage.name}/folded", in_memory=True))


def foldable(held: Iterable[AvailableCheckpoint], experts: Collection[str], least: int) -> list[Chain]:
    """Returns the chains with at least ``least`` gradients, the longest first.

    Args:
        held: snapshots, each reduced to the experts that were carried out of it.
        experts: operators whose gradients may be applied.
        least: number of gradients.
    """
    details = {one.iteration: one.operators for one in held}
    found = []
    for name in sorted(experts):
        base = max((i for i, its in details.items() if its.get(name) == Detail.FULL.value), default=None)
        if base is None:
            continue
        until = base
        while details.get(until + 1, {}).get(name) == Detail.GRAD.value:
            until += 1
        if until - base >= least:
            found.append(Chain(name, base, until))
    return sorted(found, key=lambda chain: chain.base - chain.until)
