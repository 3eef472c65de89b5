"""torchrun, as batch systems need it: it lets the workers save, and says how they ended.

Takes torchrun's arguments, and differs from it in two things:

- SIGTERM and SIGUSR1 are passed on to the workers, which save and exit when they are ready. torchrun
  kills them 30 seconds after a SIGTERM, and dies of a SIGUSR1 itself.
- It exits with the code of the first worker that failed, such as 75 for "saved after a signal, start
  me again". torchrun's own code is always 1.
"""

import signal
import sys

import psutil
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

SAVED = 75


def pass_on(number: int, _frame) -> None:
    """Sends the signal to every worker."""
    for worker in psutil.Process().children():
        try:
            worker.send_signal(number)
        except psutil.NoSuchProcess:
            pass


def main() -> int:
    """Runs the workers; returns the exit code."""
    arguments = parse_args(sys.argv[1:])
    arguments.signals_to_handle = "SIGINT,SIGHUP,SIGQUIT"
    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGUSR1, pass_on)
    try:
        run(arguments)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        print("torchrun: saved after a signal" if code == SAVED else error, file=sys.stderr)
        return code if code > 0 else 128 - code
    return 0


if __name__ == "__main__":
    sys.exit(main())
