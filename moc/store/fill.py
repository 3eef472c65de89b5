"""Values of live fragments from a checkpoint of any layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from moc.state.fragments import Fragment
from moc.state.region import Region
from moc.store.regions import MissingRegionError, RegionReader


def values_for(fragment: Fragment, reader: RegionReader) -> torch.Tensor:
    """The values of a fragment, in the shape of its region, on the host; possibly a view of a mapped file.

    Vocabulary rows that are padding only in this layout are zeros.

    Raises:
        MissingRegionError: the checkpoint holds the tensor only in part, or in another shape.
        DamagedRegionError: stored bytes do not match their hash.
    """
    region, saved = fragment.region, reader.global_shape(fragment.name, fragment.slot)
    if saved == fragment.global_shape:
        return reader.get(fragment.name, fragment.slot, region)
    if not fragment.padded:
        raise MissingRegionError(f"{fragment.name} has shape {saved} there and {fragment.global_shape} here")
    common = region.intersect(Region((0,) * len(saved), saved))
    if common == region:
        return reader.get(fragment.name, fragment.slot, region)
    values = torch.zeros(region.shape, dtype=fragment.view.dtype)
    if common is not None:
        values[common.slices(region.offset)] = reader.get(fragment.name, fragment.slot, common)
    return values


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
