"""Values that follow from flags."""

from __future__ import annotations

import importlib.util


def installed(package: str) -> bool:
    """Whether a package is installed, without importing it."""
    return importlib.util.find_spec(package) is not None
