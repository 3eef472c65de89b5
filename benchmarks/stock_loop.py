"""Runs a script of Megatron-LM with Megatron-LM's own loop, also without CUDA.

torchrun --nproc-per-node 2 benchmarks/stock_loop.py pretrain_gpt.py FLAGS
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

from megatron.pretraining.entry import cpu


def main() -> None:
    """Runs the script named by the first argument with the other arguments."""
    cpu.install()
    importlib.import_module("megatron.training")
    cpu.let_stock_loop_run()
    saving = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    saving.get_write_results_queue("fork")  # the first save would spawn its server, which imports the script
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
