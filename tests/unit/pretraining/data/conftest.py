"""Text, and a tokenizer of it."""

from pathlib import Path

import pytest

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
    from megatron.pretraining.data import tokenizer_training

    prefix = corpus.parent / f"{corpus.name}-tokenizer" / "small"
    assert tokenizer_training.main(["--input", str(corpus), "--output", str(prefix), "--vocab-size", "400"]) == 0
    return f"{prefix}.model"
