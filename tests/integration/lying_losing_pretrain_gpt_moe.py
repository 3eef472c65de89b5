"""The program that loses whole nodes, on a device that lies: see :mod:`tests.lying`."""

import os
import sys
from pathlib import Path

import pretrain_gpt_moe as program
from pretrain_gpt_moe import warm_up
from tests.integration.held_pretrain_gpt_moe import hold
from tests.integration.losing_pretrain_gpt_moe import lose_whole_nodes, tell_state

if __name__ == "__main__":
    warm_up()
    from tests import lying

    lose_whole_nodes()
    hold(Path(os.environ["TEST_MAY_END"]))
    tell_state(Path(os.environ["TEST_MAY_END"]).parent)
    sys.argv += ["--distributed-backend", "nccl"]
    lying.install()
    sys.exit(program.main())
