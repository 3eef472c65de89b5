"""What a run is called: made when a directory of checkpoints is first used, and kept there."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass

from moc.store.errors import CheckpointError
from moc.store.storage import Storage

NAME = ".run.json"


@dataclass(frozen=True)
class Run:
    """A training run, whichever jobs train it.

    Attributes:
        run: its name, 16 hex digits.
        address: of its checkpoints, as the job saw it that made the name.
        made: when, in Unix seconds.
    """

    run: str
    address: str
    made: float


def run_of(place: Storage) -> Run | None:
    """The run of which checkpoints, or what memory has of them, are in a place; None where nobody has begun one.

    Raises:
        CheckpointError: the place does not say.
        OSError: it cannot be read.
    """
    try:
        return Run(**json.loads(place.read(NAME)))
    except FileNotFoundError:
        return None
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{place.path(NAME)} does not say which run this is ({error}): restore it, or remove it; then snapshots in "
            "memory are not found"
        ) from None


def begin_run(place: Storage, address: str) -> Run:
    """The run of a place, which begins if there is none.

    Args:
        place: of checkpoints.
        address: what the flags call it.

    Raises:
        CheckpointError: the place does not say.
        OSError: it cannot be read or written.
    """
    return run_of(place) or record_run(place, Run(secrets.token_hex(8), address, round(time.time(), 3)))


def record_run(place: Storage, run: Run) -> Run:
    """Says in a place of which run it is, unless it is said already; what it says then."""
    place.create(NAME, [json.dumps(vars(run)).encode()])
    return run_of(place) or run
