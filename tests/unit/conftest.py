"""What tests of programs share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def run_tool():
    """Runs a tool as a user does, from a directory that is not the repository."""

    def run(name, *args, cwd, **options):
        path = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in path if p)}
        command = [sys.executable, str(REPOSITORY / "tools" / f"{name}.py"), *map(str, args)]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, **options)

    return run
