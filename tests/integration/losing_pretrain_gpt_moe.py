"""The program, in which an injected kill takes its whole node; it ends as ``held_pretrain_gpt_moe.py`` does."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pretrain_gpt_moe as program
from pretrain_gpt_moe import warm_up
from tests.integration.held_pretrain_gpt_moe import hold


def lose_whole_nodes() -> None:
    """Kills all processes that the launcher has started, and itself, in place of one worker."""
    from moc.runtime import inject

    def lose(_, number: int) -> None:
        os.killpg(os.getpgrp() if number == signal.SIGKILL else os.getpid(), number)

    inject.os = _Like(os, kill=lose)  # pyright: ignore[reportAttributeAccessIssue]


class _Like:
    def __init__(self, module, **ours):
        self.__dict__ |= vars(module) | ours


if __name__ == "__main__":
    warm_up()
    lose_whole_nodes()
    hold(Path(os.environ["TEST_MAY_END"]))
    sys.exit(program.main())
