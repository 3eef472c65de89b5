"""Checks megatron-core's version before it is imported; names the directory of an unsupported one on ``PYTHONPATH``.

``MOC_UNCHECKED_VERSIONS=1`` skips the version checks, so that tests can run with a newer release.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from moc.errors import UserError

OLDEST, BEFORE = (0, 19, 2), (0, 20, 0)
"""Supported versions, as in ``pyproject.toml``; bounded above, since private interfaces are used."""

WANTED = "megatron-core>=0.19.2,<0.20"


def unchecked() -> bool:
    """Returns whether the environment allows any version of megatron-core and DeepSpeed."""
    return os.environ.get("MOC_UNCHECKED_VERSIONS") == "1"


class CoreError(UserError, RuntimeError):
    """megatron-core is missing or of an unsupported version; the message states the fix."""

    code = "megatron-core-unusable"


def check_core() -> None:
    """Checks the version that ``megatron.core`` would be imported from; raises CoreError if unsupported or missing."""
    found = find_spec("megatron.core")
    if found is None or not found.submodule_search_locations:
        raise CoreError(f"megatron-core is not installed. Fix: pip install '{WANTED}'")
    if unchecked():
        return
    directory = Path(next(iter(found.submodule_search_locations)))
    version = version_in(directory)
    if version is None or not OLDEST <= version < BEFORE:
        described = "unknown" if version is None else ".".join(map(str, version))
        raise CoreError(
            f"megatron.core is taken from {directory}, whose version is {described}: this program needs {WANTED}. "
            f"Fix: if that is a checkout of Megatron-LM, take {directory.parent.parent} off PYTHONPATH, or run scripts "
            f"of its release core_v{'.'.join(map(str, OLDEST[:2]))}.0; otherwise pip install '{WANTED}'"
        )


def transformer_engine() -> str | None:
    """Returns the release of Transformer Engine that megatron-core has imported; None without one."""
    return getattr(sys.modules.get("transformer_engine"), "__version__", None)


def version_in(directory: Path) -> tuple[int, int, int] | None:
    """Returns the version of the megatron-core in a directory; None if it states none."""
    try:
        text = (directory / "package_info.py").read_text()
    except OSError:
        return None
    names = ("MAJOR", "MINOR", "PATCH")
    major, minor, patch = (re.search(rf"^{name} = (\d+)$", text, re.MULTILINE) for name in names)
    return (int(major[1]), int(minor[1]), int(patch[1])) if major and minor and patch else None
