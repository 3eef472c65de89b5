"""Reads and checks the header of a region file, without its values and without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from moc.files import decode, tree
from moc.files.decode import Count, Digest, Name, Sizes
from moc.files.text import shown
from moc.state.region import Region
from moc.store.described import Described

INDEX = "regions"
"""Metadata key of the index of entries."""
_LENGTH = 8  # a safetensors file starts with the length of its JSON header
_NUMBER_FORMATS = {8: "F64 I64", 4: "F32 I32", 2: "F16 BF16 I16", 1: "F8_E4M3 I8 U8 BOOL"}  # by bytes of an element
_ELEMENT_BYTES = {name: number for number, names in _NUMBER_FORMATS.items() for name in names.split()}


@dataclass(frozen=True)
class StoredTensor:
    """An entry of the header of a safetensors file."""

    dtype: Name
    """safetensors' name of the dtype."""
    shape: Sizes
    data_offsets: tuple[Count, Count]
    """First byte, and the one after the last, from the end of the header."""


class _Place(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """An entry of the index: the tensor and the box that an entry of the header holds."""

    name: Name
    slot: Name
    global_shape: Sizes
    offset: Sizes
    digest: Digest | None = None


@dataclass(frozen=True)
class StoredBox(Described):
    """A box of one slot of a tensor, as the header of a file describes it."""

    file: str
    name: str
    slot: str
    global_shape: tuple[int, ...]
    region: Region
    nbytes: int
    start: int = 0
    """Offset of the first byte in the file."""
    digest: str | None = None
    """xxh3-128 of the bytes in hex, if the file records it."""
    stored_as: str = ""
    """safetensors' name of the dtype."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element.

        Raises:
            ValueError: the dtype is unknown.
        """
        if self.stored_as not in _ELEMENT_BYTES:
            raise ValueError(f"the size of an element of dtype {self.stored_as!r} is unknown")
        return _ELEMENT_BYTES[self.stored_as]


def read_boxes(
    file: str, size: int, read: Callable[[int, int], bytes | memoryview], slack: bool = True
) -> list[StoredBox]:
    """Returns the boxes that a file's header describes, in the order of its index.

    Args:
        file: file name, recorded in each box.
        size: file size in bytes.
        read: returns the bytes [start, stop).
        slack: the file may be longer than its contents, as reused buffers are.

    Raises:
        OSError: the file cannot be read.
        ValueError: the header is malformed, or does not match the file's contents.
    """
    tensors, metadata, begin = read_header(size, read)
    if INDEX not in metadata:
        raise ValueError("it is not one of regions")
    index = decode.decode(metadata[INDEX], dict[Name, _Place])
    if differing := tensors.keys() ^ index.keys():
        raise ValueError(f"its tensor {shown(min(differing))} is not in both lists of its header")
    check_spans((tensors[key] for key in index), size - begin, slack)
    return [_box(file, begin, tensors[key], place) for key, place in index.items()]


def read_header(
    size: int, read: Callable[[int, int], bytes | memoryview]
) -> tuple[dict[str, StoredTensor], dict[str, str], int]:
    """Reads the header of a safetensors file.

    Args:
        size: file size in bytes.
        read: returns the bytes [start, stop).

    Returns:
        The tensors by name, the metadata, and the offset of the data.

    Raises:
        OSError: the file cannot be read.
        ValueError: the header is malformed or too long.
    """
    length = int.from_bytes(read(0, _LENGTH), "little")
    begin = _LENGTH + length
    if not 2 <= length <= min(size - _LENGTH, tree.HEADER):
        raise ValueError(f"it cannot have {length:,} bytes")
    fields = {**decode.table(decode.parse(read(_LENGTH, begin)), "it")}
    metadata = decode.convert(fields.pop("__metadata__", {}), dict[str, str])
    return decode.convert(fields, dict[str, StoredTensor]), metadata, begin


def _box(file: str, begin: int, tensor: StoredTensor, place: _Place) -> StoredBox:
    slot, name, shape = place.slot, place.name, tensor.shape
    if not len(place.global_shape) == len(place.offset) == len(shape):
        raise ValueError(f"{slot} of {name} has {len(place.global_shape)} axes, and a box of it {len(shape)}")
    elements = math.prod(shape)
    if decode.number(math.prod(place.global_shape), f"the number of elements of {name}") < elements:
        raise ValueError(f"a box of {slot} of {name} is larger than the tensor")
    (start, stop), element = tensor.data_offsets, _ELEMENT_BYTES.get(tensor.dtype)
    if element and elements * element != stop - start:
        raise ValueError(f"a box of {slot} of {name} has {stop - start} bytes instead of {elements * element}")
    region, first = Region(place.offset, shape), begin + start
    return StoredBox(file, name, slot, place.global_shape, region, stop - start, first, place.digest, tensor.dtype)


def check_spans(tensors: Iterable[StoredTensor], room: int, slack: bool) -> None:
    """Checks that each byte of a file's data belongs to one tensor.

    Args:
        tensors: all tensors of the file.
        room: bytes of data in the file.
        slack: the file may be longer than its contents.

    Raises:
        ValueError: a byte belongs to no tensor or to several, or a tensor extends beyond the end of the file.
    """
    end = 0
    for start, stop in sorted(tensor.data_offsets for tensor in tensors):
        if start != end or stop < start:
            raise ValueError(
                f"byte {min(start, end):,} of its data belongs to {'no' if start > end else 'more than one'} box"
            )
        end = stop
    if end > room or (end < room and not slack):
        truncated = ": it is truncated" if end > room else ""
        raise ValueError(f"it describes {end:,} bytes, and {room:,} follow{truncated}")
