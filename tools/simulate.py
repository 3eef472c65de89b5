#!/usr/bin/env python3
"""Says what checkpoints, failures and recovery will cost on a cluster, for every policy."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs where nothing is installed

from megatron.pretraining.planning.simulate import main

if __name__ == "__main__":
    sys.exit(main())
