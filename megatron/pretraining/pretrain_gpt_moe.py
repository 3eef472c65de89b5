"""Pre-trains a GPT language model with a mixture of experts; ``--help`` lists the options.

torchrun --nproc-per-node 4 pretrain_gpt_moe.py --model tiny --mock-data ...
"""

from __future__ import annotations

import sys
from importlib import import_module

from megatron.pretraining.process.early_stop import end_at_once


def check_arguments(arguments: list[str], least_nodes: int, nodes: int, per_node: int) -> str | None:
    """Exits with a message if the command line has a wrong option, value or path, for a launcher that starts workers.

    The process that the workers are forked from also checks combinations (:mod:`megatron.pretraining.entry.words`).
    Returns the directory or URL of the snapshots, if it is known.
    """
    defaults = import_module("megatron.pretraining.entry.own_flags").DEFAULTS
    check = import_module("megatron.pretraining.entry.words").check_arguments
    return check(sys.argv[0], arguments, nodes * per_node, nodes, defaults)


def warm_up() -> None:
    """Imports only the modules that training needs, for a launcher that forks its workers."""
    import_module("moc.megatron").warm_up()
    import_module("megatron.pretraining.entry.gpt")


def main() -> int:
    """Trains, and returns the exit code."""
    end_at_once("pretrain_gpt_moe.py")  # before imports that take seconds
    import_module("moc.megatron")
    import_module("megatron.pretraining.entry.gpt").main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
