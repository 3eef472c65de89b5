"""As ``losing_pretrain_gpt_moe.py``; no operation in storage ends while there is a file ``frozen``.

Each worker writes the calls by which its training thread began one meanwhile to a file ``awaited by PID``, and the
monotonic time of this thread after each iteration to ``ends of iterations of PID``.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import traceback
from pathlib import Path

import pretrain_gpt_moe as program
from pretrain_gpt_moe import warm_up
from tests.integration.held_pretrain_gpt_moe import hold
from tests.integration.losing_pretrain_gpt_moe import lose_whole_nodes, tell_state

OPERATIONS = "write", "create", "read", "open_blob", "list_names", "list_refused", "remove", "lock", "check_owner"


def freeze(directory: Path) -> None:
    """Makes each operation in storage wait while the file is there."""
    from moc.store.storage import LocalStorage

    mark, awaited = directory / "frozen", directory / f"awaited by {os.getpid()}"

    def frozen(operation):
        @functools.wraps(operation)
        def waits(*arguments, **options):
            if mark.exists() and threading.current_thread() is threading.main_thread():
                with open(awaited, "a") as file:
                    file.writelines(traceback.format_stack(limit=12))
            while mark.exists():
                time.sleep(0.01)
            return operation(*arguments, **options)

        return waits

    for name in OPERATIONS:
        setattr(LocalStorage, name, frozen(getattr(LocalStorage, name)))


def time_iterations(directory: Path) -> None:
    """Writes the time of the training thread after each iteration."""
    from megatron.pretraining import loop

    iterate = loop.iterate

    def timed(run, stop):
        result = iterate(run, stop)
        with open(directory / f"ends of iterations of {os.getpid()}", "a") as file:
            file.write(f"{time.monotonic()}\n")
        return result

    loop.iterate = timed


if __name__ == "__main__":
    warm_up()
    lose_whole_nodes()
    directory = Path(os.environ["TEST_MAY_END"])
    hold(directory)
    tell_state(directory.parent)
    freeze(directory.parent)
    time_iterations(directory.parent)
    sys.exit(program.main())
