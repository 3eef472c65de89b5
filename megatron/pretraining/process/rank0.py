"""Lets rank 0 report an error that all workers of a job find alike."""

from __future__ import annotations

import os
import time

PATIENCE = 15.0  # seconds for rank 0 to report and exit, whereupon the launcher ends the other workers


def is_first_worker() -> bool:
    """Whether this process is rank 0, or belongs to no job."""
    return os.environ.get("RANK", "0") == "0"


def let_first_worker_speak() -> None:
    """Waits, on all ranks but 0, until rank 0 can have reported; a worker alone with its error then reports it."""
    if not is_first_worker():
        time.sleep(PATIENCE)
