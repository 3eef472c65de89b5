#!/usr/bin/env python3
"""Prints how many bytes the busiest rank saves, and which policy to use."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs where nothing is installed

from megatron.pretraining.planning.sizes import main

if __name__ == "__main__":
    sys.exit(main())
