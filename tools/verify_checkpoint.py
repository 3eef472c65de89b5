#!/usr/bin/env python3
"""Reports whether checkpoints are valid."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs where nothing is installed

from moc.inspect.verify import main

if __name__ == "__main__":
    sys.exit(main())
