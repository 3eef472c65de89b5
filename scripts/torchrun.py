"""Runs torchrun for batch systems: lets the workers save, and exits with their exit code.

Takes torchrun's arguments, and differs from it in two things:

- SIGTERM, SIGINT, SIGUSR1 and SIGHUP are passed on to the workers, which save and exit when they are ready, or
  end immediately and report it. torchrun kills them 30 seconds after a SIGTERM, and dies of a SIGUSR1 itself.
- It exits with the code of the first worker that failed, such as 75 for "saved after a signal, start
  me again". torchrun's own code is always 1.
"""

import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs where nothing is installed

from moc.runtime.termination import end_on_signals, exit_for_signal, handled_stop_signals, stop_message

if __name__ == "__main__":  # before imports that take seconds
    end_on_signals(lambda number: f"torchrun: {stop_message(number, 128 + number, None)}", exit_for_signal)

import signal

import psutil
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

SAVED = 75
stopped_by: set[int] = set()


def pass_on(number: int, _frame) -> None:
    """Sends the signal to every worker; ends immediately if there is none yet."""
    stopped_by.add(number)
    workers = psutil.Process().children()
    if not workers:
        with contextlib.suppress(OSError):  # the disk may be full
            print(f"torchrun: {stop_message(number, 128 + number, None)}", file=sys.stderr, flush=True)
        exit_for_signal(number)
    for worker in workers:
        try:
            worker.send_signal(number)
        except psutil.NoSuchProcess:
            pass


def main() -> int:
    """Runs the workers; returns the exit code."""
    arguments = parse_args(sys.argv[1:])
    arguments.signals_to_handle = "SIGQUIT"
    for number in handled_stop_signals():
        signal.signal(number, pass_on)
    try:
        run(arguments)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        if code == SAVED:
            print("torchrun: saved after a signal", file=sys.stderr)
        elif -code not in stopped_by:  # otherwise the worker has reported it
            print(error, file=sys.stderr)
        return code if code > 0 else 128 - code
    return 0


if __name__ == "__main__":
    sys.exit(main())
