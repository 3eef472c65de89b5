#!/usr/bin/env python3
"""Lists what jobs have left in this machine's memory, and removes what no process uses."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs where nothing is installed

from moc.inspect.memory import main

if __name__ == "__main__":
    sys.exit(main())
