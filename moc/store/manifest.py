"""``manifest.json``: the contents of a checkpoint; writing it, last, publishes the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moc.files import decode
from moc.files.decode import Count, Digest, FileName, Name, StateSum
from moc.files.text import shown
from moc.state.detail import Detail, DetailName
from moc.store.digest import digest_of
from moc.store.errors import CheckpointError
from moc.store.saved_state import SavedState

NAME = "manifest.json"
FORMAT = "moc-megatron checkpoint 1"
_OPTIONAL = ("run", "job", "term", "digests")
ALIKE = "alike"
"""Key in the state of a snapshot in memory: operator names, by the number of nodes that save each element."""


StateDigests = Mapping[Name, Mapping[Name, StateSum]]
"""A rank's part of the state's digests, by operator and optimizer-state key (:mod:`moc.state.digests`)."""


@dataclass(frozen=True)
class FileEntry:
    """Expected size of a rank's file and of its header, which holds the hashes of the data, and the header's hash."""

    bytes: Count
    header_bytes: Count
    header_xxh3_128: Digest


@dataclass(frozen=True)
class OperatorEntry:
    """The saved state of an operator.

    Attributes:
        detail: value of the :class:`~moc.state.detail.Detail`.
        step: number of updates of its moments; None if not counted.
        elements: number of elements by slot.
    """

    detail: DetailName
    step: Count | None
    elements: Mapping[Name, Count]

    def at(self, detail: Detail) -> OperatorEntry:
        """Returns the part of an entry that a state subset includes; the entry itself if that is everything."""
        elements = {slot: count for slot, count in self.elements.items() if detail.holds(slot)}
        return self if elements == self.elements else OperatorEntry(detail.value, self.step, elements)


@dataclass(frozen=True)
class RankReport:
    """One rank's report of its part of a checkpoint.

    Attributes:
        name: name of its file.
        file: size and hash of the file.
        operators: contents of the file.
        job: launch of the writer, if any.
        term: term of the writer, if any.
        digests: digests of this rank's complete state, saved or not; None if they were not computed.
    """

    name: FileName
    file: FileEntry
    operators: Mapping[Name, OperatorEntry]
    job: Name = ""
    term: tuple[Count, Count] = (0, 0)
    digests: StateDigests | None = None

    def to_json(self) -> str:
        """Returns JSON text."""
        described = {"file": decode.values_of(self.file), "operators": _plain(self.operators)}
        if self.digests is not None:
            described["digests"] = self.digests
        return json.dumps({"name": self.name, **described, **_author(self.job, self.term)})

    @classmethod
    def from_json(cls, text: str) -> RankReport:
        """Inverts :meth:`to_json`; raises ValueError on other text."""
        report = decode.decode(text, cls)
        _check_sizes({report.name: report.file})
        return report


@dataclass(frozen=True)
class Manifest:
    """See ``docs/reference/format.md``."""

    iteration: Count
    policy: Name
    writers: Count
    files: Mapping[FileName, FileEntry]
    operators: Mapping[Name, OperatorEntry]
    layout: Mapping[Name, Count] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    run: Name = ""
    job: Name = ""
    term: tuple[Count, Count] = (0, 0)
    digests: Mapping[FileName, StateDigests] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether the manifest lists the files of all writers; in a node's memory it may list only some."""
        return len(self.files) == self.writers

    @property
    def alike(self) -> dict[str, int]:
        """Number of nodes that save identical replicas of an operator in their memory; only operators with several."""
        known = decode.convert(self.state.get(ALIKE, {}), dict[Count, list[Name]])
        return {name: number for number, names in known.items() for name in names if name in self.operators}

    @property
    def bytes(self) -> int:
        """Total size of the files."""
        return sum(entry.bytes for entry in self.files.values())

    def to_json(self) -> str:
        """Returns the text of ``manifest.json``; not indented, since indenting takes ten times as long."""
        described = {"files": _plain(self.files), "operators": _plain(self.operators)}
        described["state"] = decode.parse(json.dumps(self.state))  # keys that are numbers become text
        fields = {name: value for name, value in decode.values_of(self).items() if name not in _OPTIONAL}
        optional = {"run": self.run, **_author(self.job, self.term)} if self.job else {}
        if self.digests:
            optional["digests"] = self.digests
        text = _canonical({"format": FORMAT, **fields, **described, **optional})
        return _signed(text, digest_of(text.encode()))

    @classmethod
    def from_json(cls, text: str | bytes, name: str) -> Manifest:
        """Reads a manifest, called ``name`` in messages.

        Raises:
            CheckpointError: the manifest is damaged or of another format.
        """
        try:
            manifest = decode.convert(checked_fields(text, name), cls)
            _check_sizes(manifest.files)
            decode.convert(manifest.state, SavedState).check(manifest.iteration)
            return manifest
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{name} is damaged ({error}). Fix: restore it from a copy, or load another checkpoint (--ckpt-step)",
                code="checkpoint-damaged",
            ) from None


def checked_fields(text: str | bytes, name: str) -> dict[str, Any]:
    """Returns the fields of a manifest, called ``name`` in messages, after verifying its hash.

    Text in canonical form repeats no key; only other text is searched for repeated keys.

    Raises:
        CheckpointError: the manifest does not match its hash, or is of another format.
        ValueError: the text is not a JSON object, or repeats a key.
        KeyError: the hash or the format is missing.
    """
    plain = {**decode.table(decode.parse(text, unique_keys=False), "it")}
    digest, written = plain.pop("xxh3_128"), plain.pop("format")
    if written != FORMAT:
        raise CheckpointError(
            f"{name} is of format {shown(written)}, and this program reads {FORMAT!r}. Fix: load it with the release "
            "that wrote it",
            code="checkpoint-format-unknown",
        )
    canonical = _canonical({"format": written, **plain})
    if digest != digest_of(canonical.encode()):
        raise CheckpointError(
            f"{name} is damaged: it does not match its hash. Fix: restore it from a copy, or load another checkpoint "
            "(--ckpt-step)",
            code="checkpoint-damaged",
        )
    if (text.encode() if isinstance(text, str) else text) != _signed(canonical, digest).encode():
        decode.parse(text)
    return plain


def merge(parts: Iterable[RankReport]) -> tuple[dict[str, FileEntry], dict[str, OperatorEntry]]:
    """Merges the files and operators of all reports.

    Raises:
        CheckpointError: two ranks disagree about an operator, or belong to different launches.
    """
    parts, files, operators = list(parts), {}, {}
    if len(jobs := {part.job for part in parts}) > 1:
        raise CheckpointError(
            f"different launches wrote parts of one checkpoint: {', '.join(sorted(jobs))}. Fix: stop all but one, and "
            "load another checkpoint (--ckpt-step)",
            code="parts-contradictory",
        )
    for part in parts:
        files[part.name] = part.file
        for name, entry in part.operators.items():
            operators[name] = entry if name not in operators else _add(name, operators[name], entry)
    return files, operators


def _add(name: str, one: OperatorEntry, other: OperatorEntry) -> OperatorEntry:
    steps = {entry.step for entry in (one, other) if entry.step is not None}
    if one.detail != other.detail or len(steps) > 1:
        raise CheckpointError(
            f"ranks disagree about {name}: {one.detail}, {other.detail}, updates {sorted(steps)}. Fix: load another "
            "checkpoint (--ckpt-step)",
            code="parts-contradictory",
        )
    elements = dict(one.elements)
    for slot, count in other.elements.items():
        elements[slot] = elements.get(slot, 0) + count
    return OperatorEntry(one.detail, steps.pop() if steps else None, elements)


def _check_sizes(files: Mapping[str, FileEntry]) -> None:
    for name, entry in files.items():
        if entry.header_bytes > entry.bytes:
            raise ValueError(f"the header of {name} has {entry.header_bytes} bytes, and the file {entry.bytes}")


def _author(job: str, term: tuple[int, int]) -> dict:
    return {"job": job, "term": list(term)} if job else {}


def _plain(entries: Mapping[str, FileEntry | OperatorEntry]) -> dict[str, dict]:
    return {name: decode.values_of(entry) for name, entry in entries.items()}


def _canonical(plain: dict) -> str:
    """Returns the text that a manifest's hash covers; equal objects have equal texts."""
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def _signed(canonical: str, digest: str) -> str:
    return f'{canonical[:-1]},"xxh3_128":"{digest}"}}'
