"""The program, whose policies save in every second block of iterations; ``SAVING_FROM`` and ``SAVING_FOR`` say when."""

import os
import sys
from typing import Any

import pretrain_gpt_moe as program
from benchmarks.live.blocks import Blocks
from moc.policy import POLICIES


def in_blocks(plan, blocks: Blocks):
    """The method ``plan`` of a policy, which is asked only where the block saves."""
    return lambda self, iteration, *load: plan(self, iteration, *load) if blocks.saves(iteration) else None


if __name__ == "__main__":
    for kind in POLICIES.values():
        policy: Any = kind  # of which a method is replaced
        policy.plan = in_blocks(policy.plan, Blocks(int(os.environ["SAVING_FROM"]), int(os.environ["SAVING_FOR"])))
    sys.exit(program.main())
