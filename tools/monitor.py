#!/usr/bin/env python3
"""Serves page and metrics of a job without mocrun, from its events.jsonl."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs where nothing is installed

from moc.monitor.server import main

if __name__ == "__main__":
    sys.exit(main())
