"""A file of unknown origin is read or refused, with little time and memory, and no other exception."""

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.hostile_files import MOST_MB, TYPES, outcome
from tests.shared import ALL
from tests.unit.conftest import REPOSITORY

MUTATIONS = 10_000 if ALL else 300
NEVER_REFUSED = {"events.jsonl, newest"}  # a program that continues a log ignores what it cannot read


@pytest.fixture
def memory():
    """A directory in memory where possible, since thousands of files are written."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as directory:
        yield Path(directory)


@pytest.mark.parametrize("name", TYPES)
def test_up_to_a_megabyte_takes_little(tmp_path, name):
    command = [sys.executable, "-m", "tests.hostile_files", name, str(tmp_path)]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    outcomes = json.loads(ended.stdout.splitlines()[-1])
    assert outcomes and not [one for one in outcomes if one[2] not in ("read", "refused") or one[4] > MOST_MB]
    assert any(one[2] == "refused" for one in outcomes)


@pytest.mark.parametrize("name", TYPES)
def test_changed_files_are_read_or_refused(memory, name):
    kind, rng, outcomes = TYPES[name], random.Random(name), {}
    path, problems = kind.in_directory(memory), []
    for number in range(MUTATIONS):
        content = kind.mutated(rng)
        path.write_bytes(content)
        ended = outcome(kind.read, path)
        outcomes[ended] = outcomes.get(ended, 0) + 1
        if ended not in ("read", "refused"):
            problems.append(f"{number}: {content[:2000]!r}\n{ended[-1500:]}")
    print(name, {ended: count for ended, count in outcomes.items() if ended in ("read", "refused")})
    assert not problems, f"{len(problems)} problems:\n" + "\n".join(problems[:20])
    assert "refused" in outcomes
