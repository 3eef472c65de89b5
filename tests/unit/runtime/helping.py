"""A process that answers as it is told to."""

import os
import sys
import time

from moc.runtime import child_processes
from moc.runtime.helper_process import answer_calls


def answer(call: dict) -> str | int:
    """``size`` letters, after ``waits_s`` seconds; or none, where it ``dies``."""
    if call.get("dies"):
        sys.exit(1)
    time.sleep(call.get("waits_s", 0))
    return "x" * call["size"] if "size" in call else os.getpid()


if __name__ == "__main__":
    child_processes.attach_in_background()
    if "HELPING_DIES" in os.environ:
        sys.exit(1)
    answer_calls(answer)
