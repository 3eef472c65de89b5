"""Names of runs: made when a checkpoint directory is first used, and stored there."""

import secrets
import time
from dataclasses import dataclass

from moc.cli_output import print_once
from moc.files import decode
from moc.files.safe_directory import MAX_SMALL_FILE_BYTES, RefusedFileError
from moc.store.errors import CheckpointError
from moc.store.storage import Storage
from moc.store.store import Store

RUN_FILE = ".run.json"


@dataclass(frozen=True)
class Run:
    """A training run, across jobs.

    Attributes:
        run: name of the run, 16 hex digits.
        address: address of its checkpoints, as seen by the job that made the name; empty if nothing records it.
        made: creation time in Unix seconds; 0 if nothing records it.
    """

    run: decode.RunName
    address: decode.Name
    made: decode.Seconds


def find_run(storage: Storage) -> Run | None:
    """Returns the run whose checkpoints, on storage or in memory, are in a location; None if no run has begun there.

    If the record of the run is damaged or lost, the newest checkpoint names the run.

    Raises:
        OSError: the location cannot be read.
    """
    return _read_record(storage) or _run_of_newest_manifest(storage)


def begin_run(storage: Storage, address: str) -> Run:
    """Returns the run of a location, begun if there is none, with the address that the flags give.

    A damaged record stays until the owner of the location replaces it (:func:`record_run`).

    Raises:
        OSError: the location cannot be read or written.
    """
    if (run := find_run(storage)) is not None:
        return run
    new = Run(secrets.token_hex(8), address, round(time.time(), 3))
    storage.create(RUN_FILE, _encode_record(new))
    return _read_record(storage) or new


def record_run(storage: Storage, run: Run) -> None:
    """Records the run of a location that this process owns, unless there is a valid record.

    Raises:
        OSError: the location cannot be read or written.
    """
    if _read_record(storage) is None and not storage.create(RUN_FILE, _encode_record(run)):
        storage.remove(RUN_FILE)
        storage.create(RUN_FILE, _encode_record(run))


def _encode_record(run: Run) -> list[bytes]:
    return [decode.encode_with_hash(decode.field_values(run)).encode()]


def _read_record(storage: Storage) -> Run | None:
    try:
        return decode.decode_verified(storage.read(RUN_FILE, MAX_SMALL_FILE_BYTES), Run)
    except FileNotFoundError:
        return None
    except (RefusedFileError, ValueError) as error:
        print_once(
            f"{storage.display_path(RUN_FILE)} is damaged ({error}): if a checkpoint there names the run, it continues"
        )
        return None


def _run_of_newest_manifest(storage: Storage) -> Run | None:
    """Returns the run that the newest valid manifest names, if any."""
    store = Store(storage, allows_slack=True)
    for iteration in reversed(store.iterations()):
        try:
            return decode.convert({"run": store.read_manifest(iteration).run, "address": "", "made": 0.0}, Run)
        except (CheckpointError, ValueError):  # it is damaged, or no job has published it
            continue
    return None
