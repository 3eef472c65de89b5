"""What workers of the benchmarks' tests do."""

import importlib
import sys


def run_program(module: str, argv: list[str]) -> int:
    """Runs a program of ``benchmarks.save_peers``; its exit code."""
    sys.argv = [module, *argv]
    return importlib.import_module(f"benchmarks.save_peers.{module}").main()
