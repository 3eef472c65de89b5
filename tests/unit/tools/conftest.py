"""Lets tests import the tools."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))  # where a script finds its neighbours
