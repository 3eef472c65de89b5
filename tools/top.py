#!/usr/bin/env python3
"""Shows a running job in a terminal."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs where nothing is installed

from moc.monitor.top import main

if __name__ == "__main__":
    sys.exit(main())
