"""Reads ``events.jsonl`` of unknown origin; the fields that programs use have declared types."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from moc.errors import UserError
from moc.files import decode, safe_directory
from moc.files.decode import Amount, Count, Name, Seconds, short_repr
from moc.files.safe_directory import SafeDirectory, open_without_links

EVENTS_FILE = "events.jsonl"
SCHEMA = 1
"""Version of the meaning of fields; files without a version are older than 1, and have the same meaning."""
_CHUNK, _TAIL = 1 << 22, 1 << 20  # bytes
_MAX_INCOMPLETE_LINES = 1000  # lines; each start of a worker leaves at most one

_Measured = Annotated[float, Meta(ge=-1e300, le=1e300)] | None
_Difference = Annotated[float, Meta(ge=-1e12, le=1e12)]  # of two clocks, in seconds


@dataclass(frozen=True)
class RecordedLoss:
    """Loss of a worker or node, or another cause of a generation.

    Attributes:
        generation: number of the generation that it began; of the current one if it ended the job.
        cause: type of the loss, as in the event ``generation``; empty in older files.
        reason: sentence about it.
        rank: rank of the lost worker; None if no single worker caused it.
        node: lost node, or node of the lost worker; None if unknown.
        signal: number of the signal that killed the worker; None without one.
    """

    generation: Count = 0
    cause: str = ""
    reason: str = ""
    rank: Count | None = None
    node: Count | None = None
    signal: Count | None = None

    @property
    def title(self) -> str:
        """Short title in a drawing, such as ``worker 1 killed``."""
        if self.rank is not None:
            return f"worker {self.rank} {'killed' if self.signal == signal.SIGKILL else 'lost'}"
        return "restarted" if not self.cause else self.cause.replace("-", " ")


_FIELDS_BY_TYPE = {
    str: "type split tier action cause reason what where",
    Seconds: "time elapsed_s seconds copy_s hash_s write_s publish_s replicate_s",
    _Difference: "noticed_s met_s",
    Count: "iteration kept folded lost_after rank node signal generation schema least fewer experts wanted",
    int | None: "code",
    Annotated[int, Meta(ge=1, le=1 << 32)]: "world_size",
    Amount: "tokens bytes bubble_bytes not_sent_bytes raised_by made_up tokens_owed busiest_after replicas "
    "own copies small logs",
    bool: "boosted waits",
    bool | None: "exact",
    list[Count]: "stages",
    list[tuple[Count, Count]]: "lost_devices",
    list[RecordedLoss]: "earlier",
    dict[Name, Seconds]: "startup_s",
    dict[Name, Amount]: "by_layer survival max_violation_by_layer dropped_share_by_layer",
    float | None: "loss grad_norm learning_rate loss_scale perplexity",
    _Measured: "hhi skewness plt upstream_log_bytes upstream_log_iterations sparse_window gradient_window k_snapshot "
    "k_persist snapshot_interval selective_experts selective_copies selective_gradients mlt mlt_peers bubble_share "
    "storage_age storage_overdue mlt_storage max_violation dropped_share mfu",
}
_MEASUREMENTS = frozenset(_FIELDS_BY_TYPE[_Measured].split())
_KnownFields = msgspec.defstruct(
    "_Fields",
    [(name, kind | UnsetType, UNSET) for kind, names in _FIELDS_BY_TYPE.items() for name in names.split()],  # pyright: ignore[reportOperatorIssue]
)


class EventsError(UserError, ValueError):
    """A file is not an event log of this program."""

    code = "events-invalid"


class Event(dict[str, Any]):
    """An event; a field that it lacks raises EventsError."""

    def __missing__(self, field: str) -> Any:
        raise EventsError(
            f"an event {short_repr(self.get('type'))} has no {field}. Fix: give an {EVENTS_FILE} of this program"
        )


def events_file(path: str | Path) -> Path:
    """Returns the path of ``events.jsonl``, given the file or its directory."""
    path = Path(path)
    return path / EVENTS_FILE if path.is_dir() else path


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """Returns the events of a file, or of the one in a directory, each an :class:`Event`.

    Incomplete lines of killed workers are skipped.

    Raises:
        OSError: the file cannot be read, or a line is too long.
        EventsError: the file is not an event log, or a field has another type.
    """
    path = events_file(path)
    events: list[dict[str, Any]] = []
    incomplete_lines = 0
    for number, line in enumerate(SafeDirectory(path.parent).read_lines(path.name, safe_directory.MAX_LINE_BYTES), 1):
        if not line.strip():
            continue
        try:
            fields = decode.parse(line)
        except ValueError:
            incomplete_lines += 1
            if incomplete_lines > _MAX_INCOMPLETE_LINES:
                raise EventsError(
                    f"{path}: more than {_MAX_INCOMPLETE_LINES} lines are not JSON. Fix: give an {EVENTS_FILE}"
                ) from None
            continue
        if isinstance(fields, dict) and "type" in fields:
            try:
                events.append(_event_of(fields))
            except EventsError as error:
                raise EventsError(f"{path}: {error}", code=error.code) from None
            except ValueError as error:
                raise EventsError(
                    f"{path}: line {number} is not an event ({error}). Fix: give an {EVENTS_FILE} of this program"
                ) from None
    if incomplete_lines and not events:
        raise EventsError(f"{path}: no line is an event. Fix: give an {EVENTS_FILE}")
    return events


def _event_of(fields: dict[str, Any]) -> Event:
    """Returns a decoded line as an event; raises ValueError if a field has another type."""
    is_choice = fields.get("type") == "choice"  # its flags have the names of measurements, and may be words
    decode.convert({n: v for n, v in fields.items() if n not in _MEASUREMENTS} if is_choice else fields, _KnownFields)
    if fields.get("schema", SCHEMA) > SCHEMA:
        raise EventsError(
            f"an event {short_repr(fields.get('type'))} has version {fields['schema']} of the schema, and this release "
            f"reads version {SCHEMA}. Fix: use the release that wrote the file, or a newer one",
            code="events-newer",
        )
    return Event(fields)


def losses_of(event: Mapping[str, Any]) -> tuple[RecordedLoss, ...]:
    """Returns the losses that an event ``generation`` or ``end`` describes, oldest first; none of other events."""
    if event["type"] not in ("generation", "end"):
        return ()
    own = [event] if event["type"] == "generation" else []
    return tuple(decode.convert(loss, RecordedLoss) for loss in (*event.get("earlier", ()), *own))


def newest_event(path: str | Path, event_type: str) -> dict[str, Any]:
    """Returns the newest event of a type in the last MiB of a file, without checks; empty without one or a file.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        descriptor = SafeDirectory(Path(path).parent).open(Path(path).name)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    with open(descriptor, "rb", buffering=0) as file:
        tail = os.pread(descriptor, _TAIL, max(0, os.fstat(file.fileno()).st_size - _TAIL))
    begin = b'{"type": "%s"' % event_type.encode()
    for line in reversed([line for line in tail.splitlines() if line.startswith(begin)]):
        with contextlib.suppress(ValueError):  # torn
            return decode.decode(line, dict[str, Any])
    return {}


def append_event(path: str | Path, event_type: str, **fields: object) -> None:
    """Appends an event to an existing file, for processes other than the workers.

    Raises:
        OSError: the file does not exist, or cannot be written.
    """
    line = json.dumps({"type": event_type, "time": round(time.time(), 3), **fields}).encode() + b"\n"
    descriptor = open_without_links(path, os.O_RDWR | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"  # by a killed worker
        os.write(descriptor, b"\n" * is_torn + line)
    finally:
        os.close(descriptor)


class EventFollower:
    """Reads the events of a file while another process writes it.  Lines that are not events are skipped."""

    def __init__(self, path: Path):
        self.path, self.skipped = path, 0
        self._offset, self._incomplete = 0, b""
        self._file: tuple[int, int] | None = None  # device and inode

    def read(self) -> list[Event] | None:
        """Returns the next complete events, of at most 4 MiB; empty if there are none.

        Returns None, and begins again, if another file has taken the place of this one, or if it was shortened.

        Raises:
            OSError: the file cannot be read, or does not exist.
        """
        descriptor = SafeDirectory(self.path.parent).open(self.path.name)
        try:
            status = os.fstat(descriptor)
            identity = status.st_dev, status.st_ino
            if self._file not in (None, identity) or status.st_size < self._offset:
                self._file, self._offset, self._incomplete = identity, 0, b""
                return None
            self._file = identity
            data = os.pread(descriptor, _CHUNK, self._offset)
        finally:
            os.close(descriptor)
        self._offset += len(data)
        *lines, self._incomplete = (self._incomplete + data).split(b"\n")
        if len(self._incomplete) > safe_directory.MAX_LINE_BYTES:
            self._incomplete, self.skipped = b"", self.skipped + 1
        return [event for line in lines if line.strip() and (event := self._decode(line)) is not None]

    def _decode(self, line: bytes) -> Event | None:
        with contextlib.suppress(ValueError):
            fields = decode.parse(line)
            if isinstance(fields, dict) and isinstance(fields.get("time"), int | float) and "type" in fields:
                return _event_of(fields)
        self.skipped += 1
        return None
