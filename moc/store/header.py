"""Header of a shard file: it describes the tensor chunks of the file, their offsets and hashes; needs no torch.

The header is computed before the data are known (:class:`FileLayout`), except the hashes.  Headers of unknown origin
are checked when they are read.
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
from moc.files.decode import Count, Digest, Name, Sizes, short_repr
from moc.state.operators import Region
from moc.store.manifest import FileEntry, compute_digest


class HeaderTexts(NamedTuple):
    """Parts of a header's JSON.

    Attributes:
        named: the row of the index up to the hash, escaped, since the index is a string in the header.
        kind: dtype and shape, as safetensors has them.
    """

    index_row: str
    tensor_fields: str


class BoxWithTexts:
    """Base class of boxes, which makes their header texts from the attributes below."""

    name: str
    slot: str
    global_shape: tuple[int, ...]
    region: Region
    stored_as: str

    @property
    def header_texts(self) -> HeaderTexts:
        """The box's parts of a header."""
        return self._texts

    @cached_property
    def _texts(self) -> HeaderTexts:
        row = json.dumps([self.name, self.slot, self.global_shape, self.region.offset])
        kind = json.dumps({"dtype": self.stored_as, "shape": self.region.shape})
        return HeaderTexts(json.dumps(row[:-1])[1:-1], kind[1:-1])


INDEX_KEY = "regions"
"""Metadata key of the index of entries."""
_LENGTH_BYTES = 8  # a safetensors file starts with the length of its JSON header
_DTYPES_BY_SIZE = {  # by bytes of an element
    8: "F64 I64 U64 C64",
    4: "F32 I32 U32",
    2: "F16 BF16 I16 U16",
    1: "F8_E4M3 F8_E5M2 I8 U8 BOOL",
}
_ELEMENT_BYTES = {name: number for number, names in _DTYPES_BY_SIZE.items() for name in names.split()}


@dataclass(frozen=True)
class StoredTensor:
    """An entry of the header of a safetensors file."""

    dtype: Name
    """safetensors' name of the dtype."""
    shape: Sizes
    data_offsets: tuple[Count, Count]
    """First byte, and the one after the last, from the end of the header."""


class _IndexRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """An entry of the index: the tensor and the box that an entry of the header holds."""

    name: Name
    slot: Name
    global_shape: Sizes
    offset: Sizes
    digest: Digest | None = None


@dataclass(frozen=True)
class StoredBox(BoxWithTexts):
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
    file: str, size: int, read: Callable[[int, int], bytes | memoryview], allows_slack: bool = True
) -> list[StoredBox]:
    """Returns the boxes that a file's header describes, in the order of its index.

    Args:
        file: file name, recorded in each box.
        size: file size in bytes.
        read: returns the bytes [start, stop).
        allows_slack: the file may be longer than its contents, as reused buffers are.

    Raises:
        OSError: the file cannot be read.
        ValueError: the header is malformed, or does not match the file's contents.
    """
    tensors, metadata, data_start = read_header(size, read)
    if INDEX_KEY not in metadata:
        raise ValueError("it is not one of regions")
    index = decode.decode(metadata[INDEX_KEY], dict[Name, _IndexRow])
    if differing := tensors.keys() ^ index.keys():
        raise ValueError(f"its tensor {short_repr(min(differing))} is not in both lists of its header")
    check_spans((tensors[key] for key in index), size - data_start, allows_slack)
    return [_stored_box(file, data_start, tensors[key], row) for key, row in index.items()]


def read_header(
    size: int, read: Callable[[int, int], bytes | memoryview]
) -> tuple[dict[str, StoredTensor], dict[str, str], int]:
    """Reads the header of a safetensors file; returns the tensors by name, the metadata, and the offset of the data.

    Args:
        size: file size in bytes.
        read: returns the bytes [start, stop).

    Raises:
        OSError: the file cannot be read.
        ValueError: the header is malformed or too long.
    """
    length = int.from_bytes(read(0, _LENGTH_BYTES), "little")
    data_start = _LENGTH_BYTES + length
    if not 2 <= length <= min(size - _LENGTH_BYTES, safe_directory.MAX_HEADER_BYTES):
        raise ValueError(f"it cannot have {length:,} bytes")
    fields = {**decode.require_object(decode.parse(read(_LENGTH_BYTES, data_start)), "it")}
    metadata = decode.convert(fields.pop("__metadata__", {}), dict[str, str])
    return decode.convert(fields, dict[str, StoredTensor]), metadata, data_start


def _stored_box(file: str, data_start: int, tensor: StoredTensor, row: _IndexRow) -> StoredBox:
    slot, name, shape = row.slot, row.name, tensor.shape
    if not len(row.global_shape) == len(row.offset) == len(shape):
        raise ValueError(f"{slot} of {name} has {len(row.global_shape)} axes, and a box of it {len(shape)}")
    elements = math.prod(shape)
    if decode.require_count(math.prod(row.global_shape), f"the number of elements of {name}") < elements:
        raise ValueError(f"a box of {slot} of {name} is larger than the tensor")
    (start, stop), element = tensor.data_offsets, _ELEMENT_BYTES.get(tensor.dtype)
    if element and elements * element != stop - start:
        raise ValueError(f"a box of {slot} of {name} has {stop - start} bytes instead of {elements * element}")
    region, first = Region(row.offset, shape), data_start + start
    return StoredBox(file, name, slot, row.global_shape, region, stop - start, first, row.digest, tensor.dtype)


def check_spans(tensors: Iterable[StoredTensor], data_bytes: int, allows_slack: bool) -> None:
    """Checks that each byte of a file's data belongs to one tensor.

    Args:
        tensors: all tensors of the file.
        data_bytes: bytes of data in the file.
        allows_slack: the file may be longer than its contents.

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
    if end > data_bytes or (end < data_bytes and not allows_slack):
        truncated = ": it is truncated" if end > data_bytes else ""
        raise ValueError(f"it describes {end:,} bytes, and {data_bytes:,} follow{truncated}")


_PAGE = 4096  # the data start at a multiple of it, so that they can be mapped and written by pages
_NO_DIGEST = "0" * 32


class BoxDescription(Protocol):
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
        """Shape of the unsharded tensor."""
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
    def header_texts(self) -> HeaderTexts:
        """Description of the box in a header."""
        ...


class FileLayout[B: BoxDescription]:
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
        self._text_around_digests = _text_around_digests(self.entries, ends)
        unpadded = 8 + sum(map(len, self._text_around_digests)) + len(_NO_DIGEST) * len(self.entries)
        self.header_bytes = begin = -(-unpadded // _PAGE) * _PAGE
        self.spans = tuple((begin + start, begin + stop) for start, stop in pairwise(ends))
        self.nbytes = begin + ends[-1]

    def header(self, digests: Sequence[str]) -> bytes:
        """Returns the bytes before the data, given the xxh3-128 of each entry's bytes in hex."""
        *before, last = self._text_around_digests
        rows = zip(before, digests, strict=True)
        text = "".join([*chain.from_iterable(rows), last]).encode().ljust(self.header_bytes - 8)
        return len(text).to_bytes(8, "little") + text


def _text_around_digests(entries: Sequence[BoxDescription], ends: Sequence[int]) -> list[str]:
    """Returns the text of a header before each digest, and after the last.

    The text consists of the index, and of safetensors' dtype, shape, and offsets from the first byte of the data.
    """
    texts = [entry.header_texts for entry in entries]
    rows = [f'\\"{number}\\": {text.index_row}, \\"' for number, text in enumerate(texts)]
    texts_and_offsets = zip(texts, pairwise(ends), strict=True)
    described = "".join(
        f', "{number}": {{{text.tensor_fields}, "data_offsets": [{start}, {stop}]}}'
        for number, (text, (start, stop)) in enumerate(texts_and_offsets)
    )
    begin, end = f'{{"__metadata__": {{"{INDEX_KEY}": "{{', f'}}"}}{described}}}'
    around = [begin, *(['\\"], '] * (len(rows) - 1)), '\\"]' + end] if rows else [begin + end]
    return [text + row for text, row in zip(around, [*rows, ""], strict=True)]


class SubFile(NamedTuple):
    """Some boxes of a file, as a separate file.

    Attributes:
        header: its bytes before the data.
        spans: bytes [start, stop) of the source that follow the header, in this order.
        entry: its manifest entry.
    """

    header: bytes
    spans: list[tuple[int, int]]
    entry: FileEntry


def extract_sub_file(
    file: str, entry: FileEntry, header: bytes, keeps_box: Callable[[StoredBox], bool]
) -> SubFile | None:
    """Returns the kept boxes of a file, with the hashes in its header; None if no box is kept.

    If all boxes are kept, the result is the file itself.

    Args:
        file: name of the file, for messages.
        entry: its manifest entry.
        header: its bytes before the data.
        keeps_box: whether a box is kept.

    Raises:
        ValueError: the header is malformed, or lacks hashes.
    """
    boxes = read_boxes(file, entry.bytes, lambda start, stop: header[start:stop])
    kept_boxes = sorted(filter(keeps_box, boxes), key=lambda box: (-box.itemsize, box.start))
    digests = [box.digest for box in kept_boxes if box.digest is not None]
    if len(digests) < len(kept_boxes):
        raise ValueError("it has no hashes")
    if not kept_boxes:
        return None
    if len(kept_boxes) == len(boxes):
        return SubFile(header, [(len(header), entry.bytes)], entry)
    layout = FileLayout(kept_boxes)
    spans: list[tuple[int, int]] = []
    for box in kept_boxes:
        begin = spans.pop()[0] if spans and spans[-1][1] == box.start else box.start
        spans.append((begin, box.start + box.nbytes))
    text = layout.header(digests)
    return SubFile(text, spans, FileEntry(layout.nbytes, len(text), compute_digest(text)))
