#!/usr/bin/env python3
"""Converts checkpoints from one format to another one."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs where nothing is installed

from megatron.pretraining.convert.program import main

if __name__ == "__main__":
    sys.exit(main())
