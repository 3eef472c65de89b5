"""What a fragment of live memory takes from a checkpoint, whatever layout wrote it."""

from __future__ import annotations

import torch

from moc.state.fragments import Fragment
from moc.state.region import Region
from moc.store.regions import MissingRegionError, RegionReader


def values_for(fragment: Fragment, reader: RegionReader) -> torch.Tensor:
    """The values of a fragment, in the shape of its region, on the host; perhaps a view of a mapped file.

    Vocabulary rows that only this layout pads with are zeros.

    Raises:
        MissingRegionError: the checkpoint does not hold all of it, or holds a tensor of another shape.
        DamagedRegionError: what it holds does not match its hash.
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
