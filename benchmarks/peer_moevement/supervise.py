"""Runs the peer's own supervisor with workers (``worker.py``), to which it passes all unknown flags."""

# DeepSpeed need not be installed where types are checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import sys
from pathlib import Path

PATIENCE_S = 600.0


def main() -> int:
    """Returns the supervisor's exit status: 0 if all workers finished, 2 if a second worker was lost."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--checkout", type=Path, required=True, help="checkout that deepspeed must be imported from")
    own, flags = parser.parse_known_args()

    import deepspeed
    from deepspeed.launcher.survivor_supervisor import SurvivorSupervisor

    if own.checkout.resolve() not in Path(str(deepspeed.__file__)).resolve().parents:
        sys.exit(
            f"deepspeed was imported from {deepspeed.__file__}, not from {own.checkout}: give the checkout of the peer"
        )
    worker = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("worker.py"))]
    return SurvivorSupervisor([*worker, *flags], world_size=own.workers).run(timeout_sec=PATIENCE_S)


if __name__ == "__main__":
    sys.exit(main())
