"""The program, which waits before its last two iterations until a file is there; for tests that kill its workers.

``TEST_HELD_BEFORE`` is the number of these last iterations, if they are more.
However slow a test is, it finds the job running.  Workers wait in a collective, so they can be lost and woken there,
and nodes that come are met there.  Each worker writes which iterations it begins, in a file beside the other one.
``TEST_WAITS_IN`` names iterations, separated by commas, in which the first worker lets all others wait, until a file
``may go on in N`` is there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pretrain_gpt_moe as program
from pretrain_gpt_moe import warm_up


def hold(may_end: Path) -> None:
    """Makes the training loop wait for a file before its last iterations."""
    from megatron.pretraining import loop
    from megatron.pretraining.elastic.membership import DrainAgreement
    from moc.runtime.collectives import run_on_rank0, sum_over_workers

    iterate, before = loop.iterate, int(os.environ.get("TEST_HELD_BEFORE", "2"))
    begun = may_end.parent / f"begun by {os.getpid()}"
    waits_in = {int(number) for number in os.environ.get("TEST_WAITS_IN", "0").split(",")}

    def held(run, stop):
        while run.position.iteration == run.train_iters - before and not run_on_rank0(may_end.exists, "waiting"):
            for agreement in (callback for callback in run.callbacks if isinstance(callback, DrainAgreement)):
                agreement.on_totals(sum_over_workers(agreement.contribution(), run.world))
                agreement.leave()
            time.sleep(0.05)
        with open(begun, "a") as file:
            file.write(f"{run.position.iteration + 1}\n")
        may_go_on = may_end.parent / f"may go on in {run.position.iteration + 1}"
        while run.position.iteration + 1 in waits_in and run.world.rank == 0 and not may_go_on.exists():
            time.sleep(0.02)
        return iterate(run, stop)

    loop.iterate = held


if __name__ == "__main__":
    warm_up()
    hold(Path(os.environ["TEST_MAY_END"]))
    sys.exit(program.main())
