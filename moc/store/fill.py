"""Values of live fragments from a checkpoint of any layout."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from moc.state.fragments import Fragment
from moc.state.operators import MODULE_STATE
from moc.state.region import Region
from moc.store.regions import MissingRegionError, RegionReader

_INDEX = re.compile(r"[0-9]{1,9}")
"""The last part of a name of module state: the index of the worker that saved it."""


def values_for(fragment: Fragment, reader: RegionReader) -> torch.Tensor:
    """Returns the values of a fragment, in the shape of its region, on the host; possibly a view of a mapped file.

    Vocabulary rows that are padding only in this layout are zeros.  If the checkpoint has another layout, values of
    user modules are those that another worker of the stage saved; zeros mean that no values were saved.

    Raises:
        MissingRegionError: the checkpoint holds the tensor only in part, or in another shape.
        DamagedRegionError: stored bytes do not match their hash.
    """
    name, region = fragment.name, fragment.region
    if name.startswith(MODULE_STATE) and (name, fragment.slot) not in reader:
        name = _of_another_worker(name, reader)
        if name is None:
            return torch.zeros(region.shape, dtype=fragment.view.dtype)
    saved = reader.global_shape(name, fragment.slot)
    if saved == fragment.global_shape:
        return reader.get(name, fragment.slot, region)
    if not fragment.padded or len(saved) != len(region.shape):
        raise MissingRegionError(
            f"{name} has shape {saved} in the checkpoint and {fragment.global_shape} in this model. Fix: give the "
            "flags of the saved model, or load another checkpoint",
            code="checkpoint-of-another-model",
        )
    common = region.intersect(Region((0,) * len(saved), saved))
    if common == region:
        return reader.get(name, fragment.slot, region)
    values = torch.zeros(region.shape, dtype=fragment.view.dtype)
    if common is not None:
        values[common.slices(region.offset)] = reader.get(name, fragment.slot, common)
    return values


def _of_another_worker(name: str, reader: RegionReader) -> str | None:
    """Returns the saved module state of the same operator with the lowest index."""
    of_operator = name.rpartition(".")[0] + "."
    saved = {one.entry.name for one in reader.sources() if one.entry.name.startswith(of_operator)}
    numbers = {int(last): one for one in saved if _INDEX.fullmatch(last := one.removeprefix(of_operator))}
    return numbers[min(numbers)] if numbers else None


def reading_ahead(fragments: Sequence[Fragment], reader: RegionReader, lead: int = 64 << 20) -> Iterator[Fragment]:
    """Yields fragments in their order while a thread reads the values of later ones ahead, up to ``lead`` bytes."""
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as thread:
        asked, ahead = 0, 0
        for number, fragment in enumerate(fragments):
            while asked < len(fragments) and (ahead < lead or asked <= number):
                coming = fragments[asked]
                thread.submit(reader.will_read, coming.name, coming.slot, coming.region)
                asked, ahead = asked + 1, ahead + coming.view.nbytes
            yield fragment
            ahead -= fragment.view.nbytes
