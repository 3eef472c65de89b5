"""Names of runs: made when a checkpoint directory is first used, and stored there."""

import secrets
import time
from dataclasses import dataclass

from moc.files import decode
from moc.files.tree import RefusedFileError
from moc.store.errors import CheckpointError
from moc.store.storage import Storage

NAME = ".run.json"


@dataclass(frozen=True)
class Run:
    """A training run, across jobs.

    Attributes:
        run: name of the run, 16 hex digits.
        address: address of its checkpoints, as seen by the job that made the name.
        made: creation time in Unix seconds.
    """

    run: decode.RunName
    address: decode.Name
    made: decode.Seconds


def run_of(place: Storage) -> Run | None:
    """The run whose checkpoints, on storage or in memory, are in a place; None if no run has begun there.

    Raises:
        CheckpointError: the place does not say.
        OSError: it cannot be read.
    """
    try:
        return decode.unsealed(place.read(NAME), Run)
    except FileNotFoundError:
        return None
    except (RefusedFileError, ValueError) as error:
        raise CheckpointError(
            f"{place.path(NAME)} does not say which run this is ({error}): restore it, or remove it; then snapshots in "
            "memory are not found"
        ) from None


def begin_run(place: Storage, address: str) -> Run:
    """The run of a place, begun if there is none, with the address that the flags give.

    Raises:
        CheckpointError: the place does not say.
        OSError: it cannot be read or written.
    """
    return run_of(place) or record_run(place, Run(secrets.token_hex(8), address, round(time.time(), 3)))


def record_run(place: Storage, run: Run) -> Run:
    """Records the run of a place unless one is recorded, and returns the recorded one."""
    place.create(NAME, [decode.sealed(vars(run)).encode()])
    return run_of(place) or run
