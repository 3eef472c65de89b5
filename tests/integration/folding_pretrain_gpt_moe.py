"""The program as in ``held_pretrain_gpt_moe.py``, whose snapshots wait for the folder: it folds whatever it may.

However slow the folder starts, chains are folded before the run ends.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from moc.session.helpers import BackgroundOptimizer
from tests.integration.held_pretrain_gpt_moe import hold, program, warm_up


def wait_for_folders() -> None:
    """Makes snapshots wait until the folder has answered."""
    take_over = BackgroundOptimizer.install_results

    def wait_and_take_over(folds: BackgroundOptimizer, carrier) -> None:
        for order in [*folds._pending.values()]:
            with suppress(Exception):  # wait() would not return for one that was cancelled, when a generation ended
                order.result()
        take_over(folds, carrier)

    BackgroundOptimizer.install_results = wait_and_take_over


if __name__ == "__main__":
    warm_up()
    hold(Path(os.environ["TEST_MAY_END"]))
    wait_for_folders()
    sys.exit(program.main())
