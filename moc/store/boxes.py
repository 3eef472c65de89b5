"""Reads and checks the header of a region file, without its values and without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moc.files import decode
from moc.files.text import shown
from moc.state.region import Region
from moc.store.described import Described

INDEX = "regions"
"""Metadata key of the index of entries."""
_MOST_HEADER = 1 << 30
_LENGTH = 8  # a safetensors file starts with the length of its JSON header
_NUMBER_FORMATS = {8: "F64 I64", 4: "F32 I32", 2: "F16 BF16 I16", 1: "F8_E4M3 I8 U8 BOOL"}  # by bytes of an element
_ELEMENT_BYTES = {name: number for number, names in _NUMBER_FORMATS.items() for name in names.split()}


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
            raise ValueError(f"nothing says how large an element of dtype {self.stored_as!r} is")
        return _ELEMENT_BYTES[self.stored_as]


def read_boxes(
    file: str, size: int, read: Callable[[int, int], bytes | memoryview], slack: bool = True
) -> list[StoredBox]:
    """The boxes that a file's header describes, in the order of its index.

    Args:
        file: file name, recorded in each box.
        size: file size in bytes.
        read: returns the bytes [start, stop).
        slack: the file may be longer than its contents, as reused buffers are.

    Raises:
        OSError: the file cannot be read.
        ValueError: the header is malformed, or does not match the file's contents.
    """
    length = int.from_bytes(read(0, _LENGTH), "little")
    begin = _LENGTH + length
    if not 2 <= length <= min(size - _LENGTH, _MOST_HEADER):
        raise ValueError(f"it cannot have {length:,} bytes")
    try:
        header = decode.parse(bytes(read(_LENGTH, begin)))
        index = decode.parse(header.pop("__metadata__")[INDEX])
        if unknown := header.keys() - index.keys():
            raise ValueError(f"nothing says what its tensor {shown(min(unknown))} is")
        _check_spans((header[key]["data_offsets"] for key in index), size - begin, slack)
        return [_box(file, begin, header[key], *about) for key, about in index.items()]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is not one of regions: {shown(repr(error))}") from None


def _box(file: str, begin: int, tensor: dict, name, slot, global_shape, offset, digest=None) -> StoredBox:
    shape = tensor["shape"]
    decode.name(name, "a tensor")
    decode.name(slot, f"a slot of {name}")
    for each in (*global_shape, *offset, *shape):
        decode.number(each, f"a size of {name}")
    if decode.number(math.prod(global_shape), f"the number of elements of {name}") < math.prod(shape):
        raise ValueError(f"a box of {slot} of {name} is larger than the tensor")
    if digest is not None:
        decode.digest(digest, f"the hash of a box of {name}")
    if not len(global_shape) == len(offset) == len(shape):
        raise ValueError(f"{slot} of {name} has {len(global_shape)} axes, and a box of it {len(shape)}")
    (start, stop), dtype = tensor["data_offsets"], decode.name(tensor["dtype"], f"the dtype of {name}")
    element = _ELEMENT_BYTES.get(dtype)
    if element and math.prod(shape) * element != stop - start:
        raise ValueError(f"a box of {slot} of {name} has {stop - start} bytes instead of {math.prod(shape) * element}")
    region = Region(tuple(offset), tuple(shape))
    return StoredBox(file, name, slot, tuple(global_shape), region, stop - start, begin + start, digest, dtype)


def _check_spans(spans: Iterable[list[int]], room: int, slack: bool) -> None:
    end = 0
    numbers = ((decode.number(start, "an offset"), decode.number(stop, "an offset")) for start, stop in spans)
    for start, stop in sorted(numbers):
        if start != end:
            raise ValueError(
                f"byte {min(start, end):,} of its data belongs to {'no' if start > end else 'more than one'} box"
            )
        end = stop
    if end > room or (end < room and not slack):
        truncated = ": it is truncated" if end > room else ""
        raise ValueError(f"it describes {end:,} bytes, and {room:,} follow{truncated}")
