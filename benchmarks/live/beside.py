"""The training loop of a checkout in a process of its own, which trains when it is told to, beside this worker.

Each worker of a job under torchrun starts one; together they are a job of their own, with the same flags.  A checkout
is asked for its own ``benchmarks/save_peers``, so that it may be of another time.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


class Beside:
    """A worker of the job of a checkout; its methods are collective calls.

    Args:
        checkout: the root of a working tree of this project.
        flags: of ``pretrain_gpt_moe.py``.
        port: of this machine, on which the workers of the job meet; the same on all.
    """

    def __init__(self, checkout: Path, flags: Sequence[str], port: int):
        self._checkout, (self._ours, theirs) = checkout, socket.socketpair()
        with theirs:
            # torchrun keeps the store of this worker's own job, and no other
            where = {"PYTHONPATH": str(checkout), "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
            own = [sys.executable, "-W", "ignore", __file__, str(checkout.resolve()), str(theirs.fileno())]
            self._process = subprocess.Popen(
                [*own, *flags], env=os.environ | where, pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL
            )
        self._answers = self._ours.makefile()

    def timed(self, iterations: int) -> float:
        """Seconds per iteration, of so many."""
        return self._ask(iterations)["seconds"]

    def end(self) -> dict:
        """Ends it; what it says of itself: ``peak_memory_mb``."""
        told = self._ask(0)
        self._process.wait()
        return told

    def _ask(self, iterations: int) -> dict:
        self._ours.sendall(f"{iterations}\n".encode())
        if not (answer := self._answers.readline()):
            raise RuntimeError(
                f"the job of {self._checkout} has ended with {self._process.wait()}: its words are above"
            )
        return json.loads(answer)


def serve(checkout: str, descriptor: str, *flags: str) -> None:
    """Trains as many iterations as each line of a socket says, and answers with seconds per iteration, until it says 0.

    Args:
        checkout: whose code trains.
        descriptor: of the socket.
        flags: of ``pretrain_gpt_moe.py``.
    """
    sys.path[0] = checkout
    from benchmarks.save_peers import rounds, trainer

    run, stop, _ = trainer.begin(flags)
    from benchmarks.train_overhead import peak_memory
    from megatron.pretraining import loop

    for module in (rounds, loop):
        if not Path(module.__file__ or "").is_relative_to(checkout):
            raise RuntimeError(f"{module.__name__} is of {module.__file__}, and not of {checkout}: is it complete?")
    with socket.socket(fileno=int(descriptor)) as connection, connection.makefile("rw", buffering=1) as asked:
        for line in asked:
            if int(line) == 0:
                print(json.dumps({"peak_memory_mb": peak_memory()}), file=asked)
                break
            seconds = rounds.timed(lambda: loop.iterate(run, stop), int(line))
            print(json.dumps({"seconds": seconds}), file=asked)
    rounds.dist.destroy_process_group()


if __name__ == "__main__":
    serve(*sys.argv[1:])
