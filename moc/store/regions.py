"""safetensors files of regions: each entry is a box of a named tensor of the unpartitioned model.

Whoever wrote a file, under whatever layout, a reader asks for any box of any tensor and gets it put together from
the entries that overlap it.  Nothing is unpickled, and only the bytes that are needed are read.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moc.state.region import Region

_INDEX = "regions"


class MissingRegionError(RuntimeError):
    """Files do not hold all of a tensor that is asked for; the message names it."""


@dataclass(frozen=True)
class RegionTensor:
    """A box of one slot of a named tensor, and its values.

    Attributes:
        name: tensor name in the unpartitioned model.
        slot: what of it: ``master``, ``exp_avg``, ...
        global_shape: shape of the whole tensor.
        region: the box.
        values: contiguous tensor of ``region.numel`` elements, on any device.
    """

    name: str
    slot: str
    global_shape: tuple[int, ...]
    region: Region
    values: torch.Tensor


def write_regions(path: Path, entries: Iterable[RegionTensor]) -> None:
    """Writes one file; its values are copied to the host as they come."""
    tensors, index = {}, {}
    for number, entry in enumerate(entries):
        key = str(number)
        tensors[key] = entry.values.detach().reshape(entry.region.shape).cpu().contiguous()
        index[key] = [entry.name, entry.slot, list(entry.global_shape), list(entry.region.offset)]
    save_file(tensors, path, metadata={_INDEX: json.dumps(index)})


@dataclass(frozen=True)
class _Source:
    path: Path
    key: str
    global_shape: tuple[int, ...]
    region: Region


class RegionReader:
    """Answers for any box of any tensor in a set of files.

    Args:
        paths: files that :func:`write_regions` made; together they hold each element at most once.

    Raises:
        MissingRegionError: a file is not of this kind.
    """

    def __init__(self, paths: Iterable[Path]):
        self._sources: dict[tuple[str, str], list[_Source]] = defaultdict(list)
        self._files = {}
        for path in paths:
            self._add(Path(path))

    def global_shape(self, name: str, slot: str) -> tuple[int, ...]:
        """Shape of a tensor as it was saved.

        Raises:
            MissingRegionError: no file holds any of it.
        """
        sources = self._sources.get((name, slot))
        if not sources:
            raise MissingRegionError(f"no file holds {slot} of {name}")
        return sources[0].global_shape

    def read(self, name: str, slot: str, region: Region, into: torch.Tensor) -> None:
        """Fills ``into`` (``region.numel`` elements, any device) with a box of a tensor.

        Raises:
            MissingRegionError: the files do not hold all of the box.
        """
        self.global_shape(name, slot)
        target, filled = into.view(region.shape), 0
        for source in self._sources[name, slot]:
            common = region.intersect(source.region)
            if common is not None:
                stored = self._files[source.path].get_slice(source.key)
                target[common.slices(region.offset)] = stored[common.slices(source.region.offset)].to(into.device)
                filled += common.numel
        if filled != region.numel:
            raise MissingRegionError(
                f"files hold {filled} of {region.numel} elements of {slot} of {name} at {region.offset}"
            )

    def _add(self, path: Path) -> None:
        try:
            file = safe_open(path, framework="pt")
            index = json.loads(file.metadata()[_INDEX])
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise MissingRegionError(f"{path} is not a file of regions ({error})") from None
        self._files[path] = file
        for key, (name, slot, global_shape, offset) in index.items():
            shape = tuple(file.get_slice(key).get_shape())
            source = _Source(path, key, tuple(global_shape), Region(tuple(offset), shape))
            self._sources[name, slot].append(source)
