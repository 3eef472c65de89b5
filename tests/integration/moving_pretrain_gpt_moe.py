"""The program, in which any other plan of experts pays; it ends as ``held_pretrain_gpt_moe.py`` does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pretrain_gpt_moe as program
from pretrain_gpt_moe import warm_up
from tests.integration.held_pretrain_gpt_moe import hold


def move_whenever_due() -> None:
    """Makes every move pay."""
    from megatron.pretraining.elastic.rebalancing import Prospect

    Prospect.pays = lambda self, iterations: True


if __name__ == "__main__":
    warm_up()
    move_whenever_due()
    hold(Path(os.environ["TEST_MAY_END"]))
    sys.exit(program.main())
