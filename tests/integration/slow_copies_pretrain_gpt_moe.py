"""The held program, whose snapshots are copied so slowly that one of everything does not fit beside an iteration."""

import os
import sys
from pathlib import Path

import pretrain_gpt_moe as program
from pretrain_gpt_moe import warm_up
from tests.integration.held_pretrain_gpt_moe import hold

RATE = 7e5  # bytes a second

if __name__ == "__main__":
    warm_up()
    from tests.integration.pec_bodies import slow_down_copies

    slow_down_copies(RATE)
    hold(Path(os.environ["TEST_MAY_END"]))
    sys.exit(program.main())
