"""A file of unknown origin is read or refused, with little time and memory, and no other exception."""

import json
import random
import subprocess
import sys

import pytest

from tests.hostile_files import EXAMPLES, MOST_MB, READERS, fuzzed, outcome
from tests.mutations import changed
from tests.shared import ALL
from tests.unit.conftest import REPOSITORY

FUZZED = [name for name in READERS if name not in (".metadata", "manifest.json")]


@pytest.mark.parametrize("name", EXAMPLES)
def test_up_to_a_megabyte_takes_little(tmp_path, name):
    command = [sys.executable, "-m", "tests.hostile_files", name, str(tmp_path)]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    outcomes = json.loads(ended.stdout.splitlines()[-1])
    assert outcomes and not [one for one in outcomes if one[2] not in ("read", "refused") or one[4] > MOST_MB]
    assert any(one[2] == "refused" for one in outcomes)


@pytest.mark.parametrize("name", FUZZED)
def test_changed_files_are_read_or_refused(tmp_path, name):
    rng, path, outcomes = random.Random(name), tmp_path / name, []
    for _ in range(10_000 if ALL else 300):
        content = fuzzed(name, rng, changed)
        path.write_bytes(content)
        outcomes.append(outcome(READERS[name], path))
        assert outcomes[-1] in ("read", "refused"), (content, outcomes[-1])
    assert "refused" in outcomes
