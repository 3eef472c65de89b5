"""What the tests of the tools share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(REPOSITORY / "tools"))  # where a script finds its neighbours

SOURCE = '''\
import os

def first(values, default=None):
\t"""The first of the values."""
    for value in values:
        return value
    return default   # trailing blanks   \n\n\n
class Größe:\r
    pass
'''
PROSE = "The quick brown fox jumps over the lazy dog near the river bank.\nIt was a fine day, and all was well.\n"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A directory of small real text files."""
    directory = tmp_path_factory.mktemp("corpus")
    (directory / "b.txt").write_text(PROSE * 20, newline="")
    (directory / "a.txt").write_text(SOURCE * 20, newline="")
    (directory / "sub").mkdir()
    (directory / "sub" / "c.txt").write_text(PROSE[::-1] * 20, newline="")
    (directory / "ignored.bin").write_bytes(b"\xff\x00")
    return directory


@pytest.fixture(scope="session")
def model(corpus) -> str:
    """Path of a small SentencePiece model."""
    import train_tokenizer

    prefix = corpus.parent / f"{corpus.name}-tokenizer" / "small"
    assert train_tokenizer.main(["--input", str(corpus), "--output", str(prefix), "--vocab-size", "400"]) == 0
    return f"{prefix}.model"


@pytest.fixture
def run_tool():
    """Runs a tool as a user does, from a directory that is not the repository."""

    def run(name, *args, cwd, **options):
        path = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in path if p)}
        command = [sys.executable, str(REPOSITORY / "tools" / f"{name}.py"), *map(str, args)]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, **options)

    return run
