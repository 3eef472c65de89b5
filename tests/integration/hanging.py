"""The program, in which one worker computes for ever in an iteration, once, while all its threads are well."""

import sys
import time
from pathlib import Path

from pretrain_gpt_moe import main, warm_up  # noqa: F401  (the launcher warms up by it)

RANK, ITERATION = 1, 5


def hang_once() -> None:
    """Has the worker hang in the middle of its step; who computes that iteration again does not."""
    from megatron.pretraining.process import cpu

    cpu.install()
    from megatron.pretraining.engine.step import Stepper

    step = Stepper.step

    def hanging(self, iteration, *rest):
        if (self.world.rank, iteration) == (RANK, ITERATION) and not Path("hung").exists():
            Path("hung").touch()
            while True:
                time.sleep(0.01)  # beside it, others may compute
        return step(self, iteration, *rest)

    Stepper.step = hanging


if __name__ == "__main__":
    hang_once()
    sys.exit(main())
