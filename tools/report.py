#!/usr/bin/env python3
"""Says what a run was like, or several side by side."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs where nothing is installed

from moc.report.report import main

if __name__ == "__main__":
    sys.exit(main())
