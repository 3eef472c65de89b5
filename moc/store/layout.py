"""Layout of a region file: its header, and the offset of each box; known before the bytes, and without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, Protocol

from moc.state.region import Region
from moc.store.boxes import INDEX, StoredBox, read_boxes
from moc.store.described import Texts
from moc.store.digest import digest_of
from moc.store.manifest import FileEntry

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
