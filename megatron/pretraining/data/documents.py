"""Reads documents from text files, JSON lines and directories of them.

Reading is cheap and sequential; decoding and parsing are expensive. A `Reader` cuts files into `DocumentPiece`s of raw
bytes. Another process can decode them with `DocumentPiece.texts`. Invalid input raises `BadText`, with one sentence
that names the file and the line.

:class:`PairWriter` writes the encoded documents as an ``.idx`` and ``.bin`` pair that becomes visible atomically.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import gzip
import io
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megatron.pretraining.data import identity
from moc.cli_output import ToolError
from moc.files.safe_directory import create_file, open_without_links, remove_owned

DEFAULT_GLOB = ("*.txt", "*.jsonl", "*.json")
PIECE_BYTES = 64 * 1024  # tokenizers are slower on longer strings
MAX_LINE_BYTES = 256 << 20  # bytes of a document in JSON
_BITE = 1 << 11  # compressed bytes per step; zstd expands each to at most 32 KiB
_MAX_WINDOW = 1 << 27  # bytes, as the program zstd allows without --long
_COMPRESSED = (".gz", ".zst")
_JSON = (".jsonl", ".ndjson", ".json")
_BOM = b"\xef\xbb\xbf"


CORRECT = "correct it, or leave such documents out with --skip-bad"
"""Remedy for an unusable document."""


class BadText(ToolError):
    """Unusable document, or unusable rest of a file."""

    code = "text-invalid"


@dataclass(frozen=True, slots=True)
class DocumentPiece:
    """Document, or a part of one, as raw bytes of its file."""

    path: str
    line: int
    """Number of its first line, counted from 1."""
    data: bytes
    is_json: bool = False
    ends_document: bool = True
    error: str | None = None
    """Set if reading the file failed: earlier pieces of this document are void."""

    def texts(self, keys: Iterable[str]) -> dict[str, str]:
        """Returns the piece's text by JSON key; plain text has the key ``text``.

        Raises:
            BadText: not UTF-8, not a JSON object, or a key is missing or not a string.
        """
        if self.error:
            raise BadText(self.error)
        try:
            text = self.data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = self.line + self.data.count(b"\n", 0, error.start)
            raise BadText(f"{self.path}, line {line}: not UTF-8 ({error.reason}). Fix: {CORRECT}") from None
        return self._parse(text, keys) if self.is_json else {"text": text}

    def _parse(self, text: str, keys: Iterable[str]) -> dict[str, str]:
        where = f"{self.path}, line {self.line}"
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise BadText(f"{where}: not JSON ({error.msg} at character {error.pos + 1}). Fix: {CORRECT}") from None
        except RecursionError:
            raise BadText(f"{where}: JSON nested too deeply. Fix: {CORRECT}") from None
        if not isinstance(record, dict):
            raise BadText(f"{where}: a JSON object is wanted on every line. Fix: {CORRECT}")
        texts = {}
        for key in keys:
            if not isinstance(record.get(key), str):
                raise BadText(f"{where}: {'no text under' if key in record else 'no'} key {key!r}. Fix: {CORRECT}")
            texts[key] = record[key]
            try:
                texts[key].encode("utf-8")
            except UnicodeEncodeError:
                raise BadText(f"{where}: key {key!r} holds half of a surrogate pair. Fix: {CORRECT}") from None
        return texts


Splitter = Callable[[bytes], str | None]
"""Maps a line to ``"before"`` (a document starts with it), ``"drop"`` (it separates documents) or None."""


def on_blank_lines(line: bytes) -> str | None:
    """Separates documents at blank lines."""
    return None if line.strip() else "drop"


def on_regex(pattern: str) -> Splitter:
    """Returns a splitter that starts a document at every line that matches the pattern."""
    try:
        matches = re.compile(os.fsencode(pattern)).search
    except re.error as error:
        raise ToolError(
            f"--split-on-regex {pattern!r} is no regular expression: {error}. Fix: correct it", code="value-unreadable"
        ) from None
    return lambda line: "before" if matches(line.rstrip(b"\r\n")) else None


def find_files(inputs: Iterable[str], patterns: Iterable[str] = DEFAULT_GLOB) -> list[str]:
    """Returns the given files, and the files below given directories in sorted order.

    Names in directories match ``patterns`` with and without ``.gz`` and ``.zst``.  Pipes and devices in directories are
    skipped.
    """
    patterns, files = tuple(patterns), []
    for name in inputs:
        if os.path.isdir(name):
            below = [path for path in _walk(name) if _matches(path, patterns)]
            if not below:
                raise ToolError(
                    f"no file in {name} matches {' or '.join(patterns)}. Fix: give --glob, or another --input",
                    code="input-missing",
                )
            files += below
        elif os.path.exists(name):
            files.append(name)
        else:
            raise ToolError(f"--input {name} does not exist. Fix: correct the path", code="input-missing")
    return files


def _walk(directory: str) -> Iterator[str]:
    """Yields the files below a directory, each once, also below links; raises OSError if a directory is unreadable."""
    visited = set()
    for parent, subdirectories, names in os.walk(directory, onerror=_raise, followlinks=True):
        if (real := os.path.realpath(parent)) in visited:
            subdirectories.clear()
            continue
        visited.add(real)
        subdirectories.sort()
        for name in sorted(names):
            path = os.path.join(parent, name)
            if os.path.isfile(path) or not os.path.exists(path):  # a broken link is reported when it is opened
                yield path


def _raise(error: OSError) -> None:
    raise error


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    name = os.path.basename(path)
    return any(fnmatch.fnmatchcase(n, p) for n in (name, _uncompressed_name(name)) for p in patterns)


def _uncompressed_name(path: str) -> str:
    stem, suffix = os.path.splitext(path)
    return stem if suffix in _COMPRESSED else path


def is_json(path: str) -> bool:
    """Returns whether the file's name marks it as JSON lines."""
    return _uncompressed_name(path).endswith(_JSON)


class Reader:
    """Iterates over the pieces of files, in order; without ``split``, a file of plain text is one document."""

    def __init__(self, files: list[str], split: Splitter | None = None):
        self.bytes_total = sum(os.path.getsize(f) for f in files if os.path.isfile(f))
        self._files, self._split = files, split
        self._bytes_before, self._raw = 0, None

    @property
    def bytes_done(self) -> int:
        """Bytes read so far, as stored on disk."""
        return self._bytes_before + (self._raw.tell() if self._raw and self._raw.seekable() else 0)

    def __iter__(self) -> Iterator[DocumentPiece]:
        for path in self._files:
            yield from self._pieces(path)

    def _pieces(self, path: str) -> Iterator[DocumentPiece]:
        line = 1
        try:
            with open(path, "rb", buffering=1 << 18) as self._raw:
                stream = _uncompress(path, self._raw)
                if stream.peek(len(_BOM)).startswith(_BOM):
                    stream.read(len(_BOM))
                for piece in self._cut(path, stream):
                    line = piece.line + piece.data.count(b"\n")
                    yield piece
        except (OSError, EOFError, zlib.error) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            where = f"{path}, at or after line {line}"
            yield DocumentPiece(path, line, b"", error=f"{where}: cannot be read on ({reason}).")
        finally:
            self._raw = None
            self._bytes_before += os.path.getsize(path) if os.path.isfile(path) else 0

    def _cut(self, path: str, stream: BinaryIO) -> Iterator[DocumentPiece]:
        return _json_pieces(path, stream) if is_json(path) else _text_pieces(path, stream, self._split)


def _uncompress(path: str, raw: Any) -> io.BufferedReader:
    if path.endswith(".gz"):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 18)
    if path.endswith(".zst"):
        return io.BufferedReader(_ZstdFile(raw), 1 << 18)
    return raw


class _ZstdFile(io.RawIOBase):
    """Reads all frames of a .zst file; unlike the package's own reader, it detects a truncated frame."""

    def __init__(self, raw: BinaryIO):
        import zstandard

        self._zstd, self._raw = zstandard, raw
        self._frame: Any = None
        self._input, self._at, self._ready = b"", 0, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            frame_ended = self._frame is not None and self._frame.eof
            data = self._read_input(self._frame.unused_data if self._frame is not None and frame_ended else b"")
            if not data:
                if self._frame and not frame_ended:
                    raise EOFError("compressed file ended within a frame")
                return 0
            if self._frame is None or frame_ended:
                self._frame = self._zstd.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj()
            try:
                self._ready = self._frame.decompress(data)
            except self._zstd.ZstdError as error:
                raise EOFError(str(error)) from None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _read_input(self, unused: bytes) -> bytes:
        """Returns a few bytes of input, unused ones first: even a decompression bomb expands them only to megabytes."""
        self._at -= len(unused)
        if self._at >= len(self._input):
            self._input, self._at = self._raw.read(1 << 17), 0
        chunk = self._input[self._at : self._at + _BITE]
        self._at += len(chunk)
        return chunk


def _json_pieces(path: str, stream: BinaryIO) -> Iterator[DocumentPiece]:
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise EOFError(f"line {number} has more than {MAX_LINE_BYTES:,} bytes")
        if line.strip():
            yield DocumentPiece(path, number, line, is_json=True)


def _text_pieces(path: str, stream: BinaryIO, split: Splitter | None) -> Iterator[DocumentPiece]:
    pending, start, is_continued = bytearray(), 1, False
    for number, line, starts_line in _lines(stream):
        mark = split(line) if split and starts_line else None
        if mark and (pending or is_continued):
            yield DocumentPiece(path, start, bytes(pending))
            pending, is_continued = bytearray(), False
        if mark == "drop":
            continue
        if not pending:
            start = number
        pending += line
        if len(pending) >= PIECE_BYTES:
            yield DocumentPiece(path, start, bytes(pending), ends_document=False)
            pending, start, is_continued = bytearray(), number, True
    if pending or is_continued:
        yield DocumentPiece(path, start, bytes(pending))


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes, bool]]:
    """Yields numbered lines, very long ones in parts; the flag marks the first part of a line."""
    number, begins, remainder = 1, True, b""
    while data := stream.readline(PIECE_BYTES):
        data = remainder + data
        ends = data.endswith(b"\n")
        keep = len(data) if ends else _cut_position(data)
        remainder = data[keep:]
        yield number, data[:keep], begins
        begins, number = ends, number + ends
    if remainder:
        yield number, remainder, False


def _cut_position(data: bytes) -> int:
    """Returns the cut position of a long line: before the last word, or between characters."""
    space = data.rfind(b" ")
    if space > 0:
        return space
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            char_bytes = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if char_bytes > back else len(data)
        if byte < 0x80:
            break
    return len(data)


def cut_text(text: str) -> Iterator[str]:
    """Cuts a long text into parts at line ends, as `Reader` cuts plain files."""
    if len(text) < PIECE_BYTES:
        yield text
        return
    for piece in _text_pieces("", io.BytesIO(text.encode("utf-8")), None):
        if piece.data:
            yield piece.data.decode("utf-8")


def sync(path: str | Path) -> None:
    """Flushes a file, or a directory's entries, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def add_input_arguments(parser) -> None:
    """Adds the input flags that all data tools share."""
    group = parser.add_argument_group("input")
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="text files, JSON lines (.jsonl, .ndjson, .json), directories; files may be .gz or .zst",
    )
    group.add_argument(
        "--glob",
        nargs="+",
        default=list(DEFAULT_GLOB),
        metavar="PATTERN",
        help=f"which names to take in directories, compressed or not (default: {' '.join(DEFAULT_GLOB)})",
    )
    group.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="what to take from JSON lines (default: text)"
    )
    group.add_argument("--skip-bad", action="store_true", help="skip and count what cannot be read or parsed")


_TRIES, _PAUSE_S = 20, 0.1


def _locked(descriptor: int) -> bool:
    """Locks a file for this process only, retrying while the workers of a killed process still hold the lock."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(_PAUSE_S)
    return False


def _descriptor_path(descriptor: int) -> str:
    """Returns a path that opens the same file again, even if its name has been reused."""
    return f"/proc/self/fd/{descriptor}"


class PairWriter:
    """Writes one .bin/.idx pair under temporary names, which are removed at the end unless committed.

    Each document starts with the token ids ``begin`` and stops with ``end``; an existing pair is replaced only with
    ``overwrite``.  The file of its fingerprint records the ``vocabulary`` of the tokenizer.
    """

    def __init__(
        self,
        prefix: str,
        dtype,
        overwrite: bool = False,
        vocabulary: identity.VocabularyIdentity | None = None,
        begin: Sequence[int] = (),
        end: Sequence[int] = (),
    ):
        self.prefix, self.dtype, self.tokens = prefix, dtype, 0
        self._begin, self._end = begin, end
        self._overwrite, self._vocabulary, self._parts = overwrite, vocabulary, []
        self._bin, self._idx = f"{prefix}.bin.partial", f"{prefix}.idx.partial"

    def __enter__(self) -> PairWriter:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        os.makedirs(os.path.dirname(os.path.abspath(self.prefix)), exist_ok=True)
        self._lock = open(self._bin, "ab", opener=open_without_links)
        if not _locked(self._lock.fileno()):
            self._lock.close()
            raise ToolError(
                f"another process is writing {self.prefix}.bin. Fix: wait for its end, or choose another "
                "--output-prefix",
                code="output-in-use",
            )
        for path in (f"{self.prefix}.bin", f"{self.prefix}.idx"):
            if os.path.exists(path) and not self._overwrite:
                self._discard()
                raise ToolError(f"{path} exists. Fix: add --overwrite to replace it", code="output-exists")
        self._builder = IndexedDatasetBuilder(_descriptor_path(self._lock.fileno()), dtype=self.dtype)
        return self

    def __exit__(self, *exception) -> None:
        del self._builder  # closes its file
        self._discard()

    def _discard(self) -> None:
        for path in (self._bin, self._idx):
            remove_owned(Path(path))
        self._lock.close()

    def add(self, tokens) -> None:
        """Appends token ids to the current document."""
        self._parts.append(tokens)

    def end_document(self) -> bool:
        """Ends the current document; returns False if it is empty and left out."""
        import numpy

        parts, self._parts = self._parts, []
        if not any(len(part) for part in parts):
            return False
        begin, end = (numpy.array(ids, dtype=self.dtype) for ids in (self._begin, self._end))
        document: Any = numpy.concatenate(
            [begin, *parts, end]
        )  # megatron-core annotates a tensor, and accepts an array
        self._builder.add_document(document, [len(document)])
        self.tokens += len(document)
        return True

    def drop_document(self) -> None:
        """Discards the current document."""
        self._parts = []

    def complete(self) -> None:
        """Writes the index and flushes both files to disk, still under their temporary names."""
        remove_owned(Path(self._idx))
        with open(create_file(Path(self._idx)), "wb") as index:
            self._builder.finalize(_descriptor_path(index.fileno()))
        sync(self._bin)
        sync(self._idx)

    def commit(self) -> None:
        """Renames both files to their final names; an .idx is never visible together with another pair's .bin."""
        for suffix in (".idx", identity.SUFFIX):
            remove_owned(Path(f"{self.prefix}{suffix}"))
        # megatron-core caches sample indices there by path; the old pair's indices are invalid for the new pair
        with contextlib.suppress(OSError):
            remove_owned(Path(self.prefix, "cache"))
        os.replace(self._bin, f"{self.prefix}.bin")
        os.replace(self._idx, f"{self.prefix}.idx")
        identity.write_fingerprint(self.prefix, self._vocabulary)
        sync(os.path.dirname(os.path.abspath(self.prefix)))
