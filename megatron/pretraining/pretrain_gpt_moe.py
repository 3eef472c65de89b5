"""Pre-trains a GPT language model with a mixture of experts; ``--help`` lists the options.

torchrun --nproc-per-node 4 pretrain_gpt_moe.py --model tiny --mock-data ...
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from moc.cli_output import print_lines
from moc.errors import with_code
from moc.runtime import environment
from moc.runtime.program import RunDirectories
from moc.runtime.progress import PROGRESS
from moc.runtime.termination import die_by_signal, end_on_signals, stop_message


def end_at_once(program: str) -> None:
    """Makes signals that request a stop end this worker immediately, with one line of rank 0.

    Under ``mocrun``, the launcher reports the signal, which keeps its default action.
    """
    if environment.AGENT in os.environ:
        return

    def report(number: int) -> str | None:
        if os.environ.get("RANK", "0") != "0":
            return None
        return f"{program}: {stop_message(number, 128 + number, PROGRESS.iteration)}"

    end_on_signals(report, die_by_signal)


_ENTRY = "megatron.pretraining.entry"


def check_arguments(arguments: list[str], least_nodes: int, nodes: int, per_node: int) -> RunDirectories | None:
    """Exits with a message if the command line has a wrong option, value or path, for a launcher that starts workers.

    The process that the workers are forked from also checks combinations (:mod:`megatron.pretraining.entry.words`).
    Returns the directories of the run, if they are known.
    """
    words, defaults = import_module(f"{_ENTRY}.words"), import_module(f"{_ENTRY}.own_flags").DEFAULTS
    return words.check_arguments(sys.argv[0], arguments, (least_nodes, nodes, per_node), defaults)


def warm_up() -> None:
    """Imports only the modules that training needs, for a launcher that forks its workers."""
    import_module("moc.megatron").warm_up()
    import_module(f"{_ENTRY}.gpt")


def _refuse_early() -> None:
    """Exits with a message on a worker of another launcher, before imports that take seconds."""
    try:
        rank, size, per_node = environment.launcher_ranks()
    except environment.PlaceError as error:
        print_lines(f"{os.path.basename(sys.argv[0])}: error: {with_code(error)}", error=True)
        sys.exit(2)
    if rank == 0 and "torch" not in sys.modules:
        nodes = max(size // per_node, 1)
        words, defaults = import_module(f"{_ENTRY}.words"), import_module(f"{_ENTRY}.own_flags").DEFAULTS
        words.refuse_early(sys.argv[0], sys.argv[1:], (nodes, nodes, per_node), defaults)


def main() -> int:
    """Trains, and returns the exit code."""
    end_at_once("pretrain_gpt_moe.py")
    if environment.AGENT not in os.environ:  # otherwise mocrun has checked the options
        _refuse_early()
    import_module("moc.megatron")
    import_module(f"{_ENTRY}.gpt").main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
