"""Header of a shard file: it describes the tensor chunks of the file, their offsets and hashes; needs no torch.

The header is computed before the data are known (:class:`FileLayout`), except the hashes.  Headers of unknown origin are
checked when they are read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, Protocol

import msgspec

from moc.files import decode, safe_directory
from moc.files.decode import Count, Digest, Name, Sizes
from moc.files.text import shown
from moc.state.region import Region
from moc.store.manifest import FileEntry, digest_of


class Texts(NamedTuple):
    """Parts of a header's JSON.

    Attributes:
        named: the row of the index up to the hash, escaped, since the index is a string in the header.
        kind: dtype and shape, as safetensors has them.
    """

    named: str
    kind: str


class Described:
    """Base class of boxes, which makes their header texts from the attributes below."""

    name: str
    slot: str
    global_shape: tuple[int, ...]
    region: Region
    stored_as: str

    @property
    def texts(self) -> Texts:
        """The box's parts of a header."""
        return self._texts

    @cached_property
    def _texts(self) -> Texts:
        row = json.dumps([self.name, self.slot, self.global_shape, self.region.offset])
        kind = json.dumps({"dtype": self.stored_as, "shape": self.region.shape})
        return Texts(json.dumps(row[:-1])[1:-1], kind[1:-1])


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
    if not 2 <= length <= min(size - _LENGTH, safe_directory.HEADER):
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


_PAGE = 4096  # the data start at a multiple of it, so that they can be mapped and written by pages
_NO_DIGEST = "0" * 32


class Box(Protocol):
    """A box of one slot of a named tensor, as a header describes it."""

    @property
    def name(self) -> str:
        """Tensor name in the unpartitioned model."""
        ...

    @property
    def slot(self) -> str:
        """Slot of the tensor: ``master``, ``exp_avg``, ..."""
        ...

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        ...

    @property
    def region(self) -> Region:
        """Bounds of the box."""
        ...

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        ...

    @property
    def stored_as(self) -> str:
        """Name of the dtype in safetensors."""
        ...

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        ...

    @property
    def texts(self) -> Texts:
        """Description of the box in a header."""
        ...


class FileLayout[B: Box]:
    """Offsets of the entries in a file, known before their bytes.

    Attributes:
        entries: entries in file order: wide dtypes first, for alignment.
        spans: bytes [start, stop) of each entry, from the beginning of the file.
        header_bytes: size of everything before the data.
        nbytes: size of the file.
    """

    def __init__(self, entries: Iterable[B]):
        self.entries = tuple(sorted(entries, key=lambda entry: -entry.itemsize))
        ends = list(accumulate((entry.nbytes for entry in self.entries), initial=0))
        self._around = _around_digests(self.entries, ends)
        unpadded = 8 + sum(map(len, self._around)) + len(_NO_DIGEST) * len(self.entries)
        self.header_bytes = begin = -(-unpadded // _PAGE) * _PAGE
        self.spans = tuple((begin + start, begin + stop) for start, stop in pairwise(ends))
        self.nbytes = begin + ends[-1]

    def header(self, digests: Sequence[str]) -> bytes:
        """Returns the bytes before the data, given the xxh3-128 of each entry's bytes in hex."""
        *before, last = self._around
        rows = zip(before, digests, strict=True)
        text = "".join([*chain.from_iterable(rows), last]).encode().ljust(self.header_bytes - 8)
        return len(text).to_bytes(8, "little") + text


def _around_digests(entries: Sequence[Box], ends: Sequence[int]) -> list[str]:
    """Returns the text of a header before each digest, and after the last.

    The text consists of the index, and of safetensors' dtype, shape, and offsets from the first byte of the data.
    """
    texts = [entry.texts for entry in entries]
    rows = [f'\\"{number}\\": {text.named}, \\"' for number, text in enumerate(texts)]
    each = zip(texts, pairwise(ends), strict=True)
    described = "".join(
        f', "{number}": {{{text.kind}, "data_offsets": [{start}, {stop}]}}'
        for number, (text, (start, stop)) in enumerate(each)
    )
    begin, end = f'{{"__metadata__": {{"{INDEX}": "{{', f'}}"}}{described}}}'
    around = [begin, *(['\\"], '] * (len(rows) - 1)), '\\"]' + end] if rows else [begin + end]
    return [text + row for text, row in zip(around, [*rows, ""], strict=True)]


class Extract(NamedTuple):
    """Some boxes of a file, as a separate file.

    Attributes:
        header: its bytes before the data.
        spans: bytes [start, stop) of the source that follow the header, in this order.
        entry: its manifest entry.
    """

    header: bytes
    spans: list[tuple[int, int]]
    entry: FileEntry


def extract(file: str, entry: FileEntry, header: bytes, keeps: Callable[[StoredBox], bool]) -> Extract | None:
    """Returns the kept boxes of a file, with the hashes in its header; None if no box is kept.

    If all boxes are kept, the result is the file itself.

    Args:
        file: name of the file, for messages.
        entry: its manifest entry.
        header: its bytes before the data.
        keeps: whether a box is kept.

    Raises:
        ValueError: the header is malformed, or lacks hashes.
    """
    boxes = read_boxes(file, entry.bytes, lambda start, stop: header[start:stop])
    chosen = sorted(filter(keeps, boxes), key=lambda box: (-box.itemsize, box.start))
    digests = [box.digest for box in chosen if box.digest is not None]
    if len(digests) < len(chosen):
        raise ValueError("it has no hashes")
    if not chosen:
        return None
    if len(chosen) == len(boxes):
        return Extract(header, [(len(header), entry.bytes)], entry)
    layout = FileLayout(chosen)
    spans: list[tuple[int, int]] = []
    for box in chosen:
        begin = spans.pop()[0] if spans and spans[-1][1] == box.start else box.start
        spans.append((begin, box.start + box.nbytes))
    text = layout.header(digests)
    return Extract(text, spans, FileEntry(layout.nbytes, len(text), digest_of(text)))
