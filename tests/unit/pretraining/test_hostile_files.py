"""A file of unknown origin is read or refused, with little time and memory, and no other exception."""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from tests.cases import each_row
from tests.hostile_files import MOST_MB, TYPES, outcome
from tests.shared import ALL
from tests.unit.conftest import REPOSITORY

MUTATIONS = 10_000 if ALL else 300
NEVER_REFUSED = {"events.jsonl, newest"}  # a program that continues a log ignores what it cannot read


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, list]:
    """By type, how reading each hostile file ends in a process with limits."""
    command = [sys.executable, "-m", "tests.hostile_files", str(tmp_path_factory.mktemp("hostile"))]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@each_row("name", TYPES)
def test_hostile_file_is_handled_within_memory_limit(outcomes, name):
    assert outcomes[name]
    assert not [one for one in outcomes[name] if one[2] not in ("read", "refused") or one[4] > MOST_MB]
    assert any(one[2] == "refused" for one in outcomes[name])


@each_row("name", TYPES)
def test_mutated_files_are_read_or_refused(name):
    kind, rng, counts, problems = TYPES[name], random.Random(name), Counter(), []
    # in memory where possible, since thousands of files are written
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as directory:
        path = kind.in_directory(Path(directory))
        for number in range(MUTATIONS):
            content = kind.mutated(rng)
            path.write_bytes(content)
            ended = outcome(kind.read, path)
            counts[ended] += 1
            if ended not in ("read", "refused"):
                problems.append(f"{number}: {content[:2000]!r}\n{ended[-1500:]}")
    assert not problems, f"{len(problems)} problems:\n" + "\n".join(problems[:20])
    assert counts["refused"]
