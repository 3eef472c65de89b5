"""Names of runs: made when a checkpoint directory is first used, and stored there."""

import secrets
import time
from dataclasses import dataclass

from moc.files import decode
from moc.files.safe_directory import SMALL, RefusedFileError
from moc.output import print_once
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


def run_of(place: Storage) -> Run | None:
    """Returns the run whose checkpoints, on storage or in memory, are in a location; None if no run has begun there.

    If the record of the run is damaged or lost, the newest checkpoint names the run.

    Raises:
        OSError: the location cannot be read.
    """
    return _recorded(place) or _published(place)


def begin_run(place: Storage, address: str) -> Run:
    """Returns the run of a location, begun if there is none, with the address that the flags give.

    A damaged record stays until the owner of the location replaces it (:func:`record_run`).

    Raises:
        OSError: the location cannot be read or written.
    """
    if (found := run_of(place)) is not None:
        return found
    new = Run(secrets.token_hex(8), address, round(time.time(), 3))
    place.create(RUN_FILE, _parts(new))
    return _recorded(place) or new


def record_run(place: Storage, run: Run) -> None:
    """Records the run of a location that this process owns, unless there is a valid record.

    Raises:
        OSError: the location cannot be read or written.
    """
    if _recorded(place) is None and not place.create(RUN_FILE, _parts(run)):
        place.remove(RUN_FILE)
        place.create(RUN_FILE, _parts(run))


def _parts(run: Run) -> list[bytes]:
    return [decode.sealed(decode.values_of(run)).encode()]


def _recorded(place: Storage) -> Run | None:
    try:
        return decode.unsealed(place.read(RUN_FILE, SMALL), Run)
    except FileNotFoundError:
        return None
    except (RefusedFileError, ValueError) as error:
        print_once(f"{place.path(RUN_FILE)} is damaged ({error}): if a checkpoint there names the run, it continues")
        return None


def _published(place: Storage) -> Run | None:
    """Returns the run that the newest valid manifest names, if any."""
    store = Store(place, slack=True)
    for iteration in reversed(store.iterations()):
        try:
            return decode.convert({"run": store.manifest(iteration).run, "address": "", "made": 0.0}, Run)
        except (CheckpointError, ValueError):  # it is damaged, or no job has published it
            continue
    return None
