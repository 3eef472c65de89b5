"""The check of a script's flags, in a child of the process that forks workers."""

import subprocess
import sys
import time
from pathlib import Path

from tests.worlds import REPOSITORY

CHECKS = """
import sys
sys.path.insert(0, sys.argv.pop(1))
sys.modules["moc.megatron"] = sys
from moc.runtime.program import flag_errors
flag_errors(sys.argv[1], [], 1)
"""
SLEEPS = """
import os, pathlib, time
pathlib.Path("pid.new").write_text(str(os.getpid()))
os.rename("pid.new", "pid")
time.sleep(600)
"""


def test_flag_check_ends_with_forkserver(tmp_path):
    (tmp_path / "script.py").write_text(SLEEPS)
    checks = subprocess.Popen([sys.executable, "-c", CHECKS, str(REPOSITORY), "script.py"], cwd=tmp_path)
    while not (tmp_path / "pid").exists():
        assert checks.poll() is None
        time.sleep(0.01)
    checks.kill()
    checks.wait()
    child = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
