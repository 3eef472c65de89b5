"""The held program on a device that lies: see :mod:`tests.lying`."""

import os
import sys
from pathlib import Path

import pretrain_gpt_moe as program
from pretrain_gpt_moe import warm_up
from tests.integration.held_pretrain_gpt_moe import hold

if __name__ == "__main__":
    warm_up()
    from tests import lying

    sys.argv += ["--distributed-backend", "nccl"]
    lying.install()
    if "TEST_MAY_END" in os.environ:
        hold(Path(os.environ["TEST_MAY_END"]))
    sys.exit(program.main())
