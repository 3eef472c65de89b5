"""``manifest.json``: the contents of a checkpoint.

Each rank reports its shard file.  The publisher merges the reports into a manifest (:func:`assemble`).  Writing the
manifest, as the last file, publishes the checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedIOBase, RawIOBase
from typing import Any

import xxhash

from moc.files import decode
from moc.files.decode import Count, Digest, FileName, Name, StateSum, short_repr
from moc.state.operators import Detail, DetailName, Operator
from moc.state.record import StepRecord
from moc.store.errors import CheckpointError

_LARGEST_BATCH = 1 << 24  # samples of an iteration


@dataclass(frozen=True)
class SavedState:
    """Everything in a snapshot that is not a tensor; engines add fields, such as ``shape``, and check them.

    Attributes:
        iteration: iterations completed.
        consumed_samples: samples consumed.
        skipped_iterations: number of completed iterations without an update.
        record: step record of the last iteration; None at the start of a run.
        interval: state of the policy's interval.
        policy_state: state of the policy.
        ledger: state of the token ledger; None if tokens are not counted.
        auto: measurements and choice of ``--ckpt-policy auto``.
        alike: in a snapshot in memory, names of operators that several nodes save, by the number of nodes.
        copied: in a snapshot in memory, the operators that are copied to other nodes; None for all.
    """

    iteration: Count | None = None
    consumed_samples: Count = 0
    skipped_iterations: Count = 0
    record: StepRecord | None = None
    interval: dict[str, Any] | None = None
    policy_state: dict[str, Any] | None = None
    ledger: dict[str, Any] | None = None
    auto: dict[str, Any] | None = None
    alike: Mapping[Count, list[Name]] = field(default_factory=dict)
    copied: list[Name] | None = None

    def validate(self, iteration: int) -> None:
        """Checks the iterations and samples of state and record against the manifest's iteration.

        Raises:
            ValueError: the values contradict each other.
        """
        for source, saved_iteration in (("state", self.iteration), ("record", self.record and self.record.iteration)):
            if saved_iteration is not None and saved_iteration != iteration:
                raise ValueError(f"its {source} is of iteration {saved_iteration}, not of {iteration}")
        if self.consumed_samples > _LARGEST_BATCH * max(iteration, 1) or self.skipped_iterations > iteration:
            samples, skipped = self.consumed_samples, self.skipped_iterations
            raise ValueError(
                f"{samples} samples and {skipped} skipped iterations are impossible at iteration {iteration}"
            )


_BLOCK = 4 << 20


def compute_digest(data) -> str:
    """Returns the xxh3-128 of a buffer, in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def compute_file_digest(
    file: BufferedIOBase | RawIOBase, size: int, on_progress: Callable[[int], object] = lambda count: None
) -> str:
    """Returns the xxh3-128 of the next ``size`` bytes of a file, or of fewer if it ends, in hex.

    Calls ``on_progress`` with the number of bytes of each block read.
    """
    hasher, block = xxhash.xxh3_128(), memoryview(bytearray(min(size, _BLOCK)))
    while size and (count := file.readinto(block[: min(size, len(block))])):
        hasher.update(block[:count])
        on_progress(count)
        size -= count
    return hasher.hexdigest()


MANIFEST_FILE = "manifest.json"
FORMAT = "moc-megatron checkpoint 1"
_OPTIONAL = ("run", "job", "term", "digests")
REPLICAS_KEY = "alike"
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
        detail: value of the :class:`~moc.state.operators.Detail`.
        step: number of updates of its moments; None if not counted.
        elements: number of elements by slot.
    """

    detail: DetailName
    step: Count | None
    elements: Mapping[Name, Count]

    def restricted_to(self, detail: Detail) -> OperatorEntry:
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
        described = {"file": decode.field_values(self.file), "operators": _entries_to_json(self.operators)}
        if self.digests is not None:
            described["digests"] = self.digests
        return json.dumps({"name": self.name, **described, **_author_fields(self.job, self.term)})

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
    def is_complete(self) -> bool:
        """Whether the manifest lists the files of all writers; in a node's memory it may list only some."""
        return len(self.files) == self.writers

    @property
    def replica_counts(self) -> dict[str, int]:
        """Number of nodes that save identical replicas of an operator in their memory; only operators with several."""
        names_by_count = decode.convert(self.state.get(REPLICAS_KEY, {}), dict[Count, list[Name]])
        return {name: number for number, names in names_by_count.items() for name in names if name in self.operators}

    @property
    def nbytes(self) -> int:
        """Total size of the files."""
        return sum(entry.bytes for entry in self.files.values())

    def to_json(self) -> str:
        """Returns the text of ``manifest.json``; not indented, since indenting takes ten times as long."""
        described = {"files": _entries_to_json(self.files), "operators": _entries_to_json(self.operators)}
        described["state"] = decode.parse(json.dumps(self.state))  # keys that are numbers become text
        fields = {name: value for name, value in decode.field_values(self).items() if name not in _OPTIONAL}
        optional = {"run": self.run, **_author_fields(self.job, self.term)} if self.job else {}
        if self.digests:
            optional["digests"] = self.digests
        text = _canonical_json({"format": FORMAT, **fields, **described, **optional})
        return _with_digest(text, compute_digest(text.encode()))

    @classmethod
    def from_json(cls, text: str | bytes, name: str) -> Manifest:
        """Reads a manifest, called ``name`` in messages.

        Raises:
            CheckpointError: the manifest is damaged or of another format.
        """
        try:
            manifest = decode.convert(parse_verified(text, name), cls)
            _check_sizes(manifest.files)
            decode.convert(manifest.state, SavedState).validate(manifest.iteration)
            return manifest
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{name} is damaged ({error}). Fix: restore it from a copy, or load another checkpoint (--ckpt-step)",
                code="checkpoint-damaged",
            ) from None


def parse_verified(text: str | bytes, name: str) -> dict[str, Any]:
    """Returns the fields of a manifest, called ``name`` in messages, after verifying its hash.

    Text in canonical form repeats no key; only other text is searched for repeated keys.

    Raises:
        CheckpointError: the manifest does not match its hash, or is of another format.
        ValueError: the text is not a JSON object, or repeats a key.
        KeyError: the hash or the format is missing.
    """
    fields = {**decode.require_object(decode.parse(text, unique_keys=False), "it")}
    digest, format_name = fields.pop("xxh3_128"), fields.pop("format")
    if format_name != FORMAT:
        raise CheckpointError(
            f"{name} is of format {short_repr(format_name)}, and this program reads {FORMAT!r}. Fix: load it with the "
            "release that wrote it",
            code="checkpoint-format-unknown",
        )
    canonical = _canonical_json({"format": format_name, **fields})
    if digest != compute_digest(canonical.encode()):
        raise CheckpointError(
            f"{name} is damaged: it does not match its hash. Fix: restore it from a copy, or load another checkpoint "
            "(--ckpt-step)",
            code="checkpoint-damaged",
        )
    if (text.encode() if isinstance(text, str) else text) != _with_digest(canonical, digest).encode():
        decode.parse(text)
    return fields


def merge_reports(reports: Iterable[RankReport]) -> tuple[dict[str, FileEntry], dict[str, OperatorEntry]]:
    """Merges the files and operators of all reports.

    Raises:
        CheckpointError: two ranks disagree about an operator, or belong to different launches.
    """
    reports, files, operators = list(reports), {}, {}
    if len(jobs := {report.job for report in reports}) > 1:
        raise CheckpointError(
            f"different launches wrote parts of one checkpoint: {', '.join(sorted(jobs))}. Fix: stop all but one, and "
            "load another checkpoint (--ckpt-step)",
            code="parts-contradictory",
        )
    for report in reports:
        files[report.name] = report.file
        for name, entry in report.operators.items():
            operators[name] = entry if name not in operators else _merge_entries(name, operators[name], entry)
    return files, operators


def _merge_entries(name: str, first: OperatorEntry, second: OperatorEntry) -> OperatorEntry:
    steps = {entry.step for entry in (first, second) if entry.step is not None}
    if first.detail != second.detail or len(steps) > 1:
        raise CheckpointError(
            f"ranks disagree about {name}: {first.detail}, {second.detail}, updates {sorted(steps)}. Fix: load another "
            "checkpoint (--ckpt-step)",
            code="parts-contradictory",
        )
    elements = dict(first.elements)
    for slot, count in second.elements.items():
        elements[slot] = elements.get(slot, 0) + count
    return OperatorEntry(first.detail, steps.pop() if steps else None, elements)


def _check_sizes(files: Mapping[str, FileEntry]) -> None:
    for name, entry in files.items():
        if entry.header_bytes > entry.bytes:
            raise ValueError(f"the header of {name} has {entry.header_bytes} bytes, and the file {entry.bytes}")


def _author_fields(job: str, term: tuple[int, int]) -> dict:
    return {"job": job, "term": list(term)} if job else {}


def _entries_to_json(entries: Mapping[str, FileEntry | OperatorEntry]) -> dict[str, dict]:
    return {name: decode.field_values(entry) for name, entry in entries.items()}


def _canonical_json(fields: dict) -> str:
    """Returns the text that a manifest's hash covers; equal objects have equal texts."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def _with_digest(canonical: str, digest: str) -> str:
    return f'{canonical[:-1]},"xxh3_128":"{digest}"}}'


_PARAM = "param"


def replicas_entry(operators: Iterable[str], nodes: Mapping[str, int]) -> dict[str, dict[str, list[str]]]:
    """Returns the entry of :data:`REPLICAS_KEY` for a snapshot of operators, empty if no replica is identical.

    Args:
        operators: operators of the snapshot.
        nodes: by operator, the number of nodes that save each element, if several do.
    """
    by_count: dict[str, list[str]] = {}
    for name in operators:
        if name in nodes:
            by_count.setdefault(str(nodes[name]), []).append(name)
    return {REPLICAS_KEY: by_count} if by_count else {}


def assemble(
    reports: Iterable[RankReport],
    iteration: int,
    policy: str,
    writers: int,
    planned_operators: Iterable[Operator],
    layout: Mapping[str, int],
    state: Mapping[str, object],
) -> Manifest:
    """Builds a manifest from reports, and refuses an incomplete one.

    Args:
        reports: reports of all ranks, or of the ranks whose files are in one node's memory.
        iteration: iterations completed.
        policy: name of the policy.
        writers: number of ranks that write, over all nodes.
        planned_operators: operators that the checkpoint must hold, with all parameters in each of their slots.
        layout: sizes of the layout.
        state: state that is not a tensor.

    Raises:
        CheckpointError: an operator is missing or partial although all ranks have reported, or reports contradict.
    """
    reports = list(reports)
    files, operators = merge_reports(reports)
    digests = {report.name: report.digests for report in reports if report.digests is not None}
    manifest = Manifest(iteration, policy, writers, files, operators, layout, state, digests=digests)
    if manifest.is_complete:
        slots = _slots_by_detail(operators.values())
        for operator in planned_operators:
            if missing_part := _missing_part(operator, operators.get(operator.name), slots):
                raise CheckpointError(
                    f"the checkpoint of iteration {iteration} is not published: it lacks {missing_part}. Fix: let the "
                    "ranks of each pipeline stage describe all fragments of their operators",
                    code="operator-incomplete",
                )
    return manifest


def merge_manifests(manifests: Sequence[Manifest]) -> Manifest:
    """Merges the manifests of a checkpoint whose parts are in the memories of several nodes.

    Raises:
        CheckpointError: two nodes disagree about an operator, or hold parts of different launches.
    """
    reports = []
    for manifest in manifests:
        operators = [manifest.operators, *[{}] * (len(manifest.files) - 1)]  # covers all files, so count it once
        jobs = [manifest.job] * len(manifest.files)
        reports += map(RankReport, manifest.files, manifest.files.values(), operators, jobs)
    files, operators = merge_reports(reports)
    digests = {name: value for manifest in manifests for name, value in manifest.digests.items()}
    return dataclasses.replace(manifests[0], files=files, operators=operators, digests=digests)


def _slots_by_detail(entries: Iterable[OperatorEntry]) -> dict[str, set[str]]:
    """Returns the slots of each saved state subset, equal for all its operators; drops slots outside of the subset."""
    slots_by_detail: dict[str, set[str]] = {}
    for entry in entries:
        slots_by_detail.setdefault(entry.detail, set()).update(entry.elements)
    return {
        detail: {slot for slot in slots if Detail(detail).holds(slot) and (slot != _PARAM or detail == "compute")}
        for detail, slots in slots_by_detail.items()
    }


def _missing_part(operator: Operator, entry: OperatorEntry | None, slots: Mapping[str, set[str]]) -> str | None:
    if entry is None:
        return operator.name
    for slot in sorted(slots[entry.detail]):
        missing = operator.elements(slot) - entry.elements.get(slot, 0)
        if missing > 0 or (missing and slot != _PARAM):  # a router's biases are not among its parameters
            return f"{missing} of {operator.elements(slot)} {slot} of {operator.name}"
    return None if slots[entry.detail] else f"all slots of {operator.name}"
