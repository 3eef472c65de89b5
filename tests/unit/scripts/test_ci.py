"""What failed is run once more by itself, and told."""

import subprocess
import sys
from pathlib import Path

import pytest

AGAIN = Path(__file__).resolve().parents[3] / ".ci" / "again.py"
TESTS = """
import os, pathlib, pytest

@pytest.mark.parametrize("word", ["a b", "c"])
def test_second_time(word):
    seen = pathlib.Path(word)
    if not seen.exists():
        seen.touch()
        raise AssertionError

def test_fine():
    with open("fine", "a") as file:
        file.write("x")

@pytest.mark.parametrize("number", range(int(os.environ["BROKEN"])))
def test_broken(number):
    raise AssertionError
"""


def again(directory: Path, broken: int, monkeypatch) -> subprocess.CompletedProcess:
    monkeypatch.setenv("BROKEN", str(broken))
    (directory / "test_some.py").write_text(TESTS)
    first = subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=directory, capture_output=True, text=True)
    assert first.returncode == 1, first.stdout
    return subprocess.run([sys.executable, AGAIN], cwd=directory, capture_output=True, text=True)


def test_what_passes_by_itself_is_told_as_flaky(tmp_path, monkeypatch):
    ended = again(tmp_path, 0, monkeypatch)
    told = [line for line in ended.stdout.splitlines() if line.startswith("FLAKY")]
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert told == [f"FLAKY test_some.py::test_second_time[{word}]" for word in ("a b", "c")]
    assert (tmp_path / "fine").read_text() == "x"  # what passed is not run again


@pytest.mark.parametrize(("broken", "told"), [(1, "1 failed, 2 passed"), (4, "6 tests failed")])
def test_what_fails_again_or_too_many_failures_fail_the_run(broken, told, tmp_path, monkeypatch):
    ended = again(tmp_path, broken, monkeypatch)
    assert ended.returncode == 1 and told in ended.stdout
    assert "FLAKY" not in ended.stdout
