"""Who speaks, where all workers of a job have found the same mistake."""

from __future__ import annotations

import os
import time

PATIENCE = 3.0  # seconds in which the first worker says it, and its exit makes the launcher end the others


def is_first_worker() -> bool:
    """Whether this is the job's first worker, or there is no job."""
    return os.environ.get("RANK", "0") == "0"


def let_first_worker_speak() -> None:
    """Waits, on every other worker; one that is alone with its mistake goes on and says it."""
    if not is_first_worker():
        time.sleep(PATIENCE)
