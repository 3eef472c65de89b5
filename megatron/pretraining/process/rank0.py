"""Lets rank 0 report an error that occurs on all workers of a job."""

from __future__ import annotations

import os
import time

PATIENCE = 15.0  # seconds for rank 0 to report and exit; the launcher then ends the other workers


def is_first_worker() -> bool:
    """Returns whether this process is rank 0, or belongs to no job."""
    return os.environ.get("RANK", "0") == "0"


def let_first_worker_speak() -> None:
    """Waits, except on rank 0, until rank 0 can have reported; others then report errors that only they have."""
    if not is_first_worker():
        time.sleep(PATIENCE)
