"""What failed is run once more by itself, and told."""

import os
import shutil
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


def test_passing_rerun_is_reported_as_flaky(tmp_path, monkeypatch):
    ended = again(tmp_path, 0, monkeypatch)
    told = [line for line in ended.stdout.splitlines() if line.startswith("FLAKY")]
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert told == [f"FLAKY test_some.py::test_second_time[{word}]" for word in ("a b", "c")]
    assert (tmp_path / "fine").read_text() == "x"  # what passed is not run again


@pytest.mark.parametrize(("broken", "told"), [(1, "1 failed, 2 passed"), (4, "6 tests failed")])
def test_failed_rerun_or_too_many_failures_fail_run(broken, told, tmp_path, monkeypatch):
    ended = again(tmp_path, broken, monkeypatch)
    assert ended.returncode == 1 and told in ended.stdout
    assert "FLAKY" not in ended.stdout


COMMANDS = {  # "there" is installed; "broken" cannot be
    "dpkg-query": 'for last; do true; done; [ "$last" = there ] && printf "install ok installed" || exit 1',
    "apt-get": 'echo "$*" >>calls; [ "$1" = update ] && exit "$UPDATE"; case $* in *broken) exit 100 ;; esac; exit 0',
    "sudo": 'shift; exec "$@"',
}


def installed(directory: Path, packages: str, update: str = "0") -> tuple[subprocess.CompletedProcess, list[str]]:
    """Runs ``.ci/install`` with stand-ins for Debian's commands; returns also what apt-get was called with."""
    shutil.copy(AGAIN.with_name("install"), directory)
    (directory / "packages").write_text(packages)
    for name, text in COMMANDS.items():
        (directory / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (directory / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{directory}:{os.environ['PATH']}", "UPDATE": update}
    done = subprocess.run(["bash", directory / "install"], env=environment, capture_output=True, text=True)
    calls = directory / "calls"
    return done, calls.read_text().splitlines() if calls.exists() else []


def test_missing_packages_are_installed(tmp_path):
    done, calls = installed(tmp_path, "# a comment\nthere\n\none  # why\ntwo\n")
    assert done.returncode == 0 and not done.stderr
    assert [call.split()[0] for call in calls] == ["update", "install", "install"]
    assert [call.split()[-1] for call in calls[1:]] == ["one", "two"]


def test_failed_package_is_named_and_others_are_installed(tmp_path):
    done, calls = installed(tmp_path, "broken\none\n", update="100")
    assert done.returncode == 0 and len(done.stderr.splitlines()) == 1 and "broken" in done.stderr
    assert [call.split()[-1] for call in calls[1:]] == ["broken", "one"]


def test_installed_packages_need_no_apt_call(tmp_path):
    done, calls = installed(tmp_path, "there\n")
    assert done.returncode == 0 and not calls
