#!/usr/bin/env python3
"""Lists and copies recipes, scripts, Slurm templates and examples."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs where nothing is installed

from megatron.pretraining.examples.program import main

if __name__ == "__main__":
    sys.exit(main())
