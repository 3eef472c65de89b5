"""Values that one pytest worker computes and all parallel workers of the run use."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

ALL = bool(os.environ.get("MOC_TESTS_ALL"))
"""Whether to run the complete suite: the tests of ``left_out.txt``, and every case where a part is enough otherwise."""

VARIABLE = "MOC_TESTS_SHARED"  # directory of this run of pytest: see tests/conftest.py


def left_out() -> list[str]:
    """Node ids, relative to ``tests``, of the tests that only the complete suite runs."""
    lines = Path(__file__).with_name("left_out.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def once(key: object, compute: Callable[[], object]) -> object:
    """The value of ``compute``, as JSON holds it, which the first worker to ask for ``key`` computes.

    A failed computation leaves nothing: the next worker to ask computes again.
    """
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    path = Path(os.environ[VARIABLE], name)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it with a worker that dies
        if not path.exists():
            computed = path.with_suffix(".new")
            computed.write_text(json.dumps(compute()))
            computed.rename(path)
    return json.loads(path.read_text())
