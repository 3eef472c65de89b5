"""Data for the tiny model."""

import pytest

from tests.worlds import run_world


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> str:
    """Prefix of a small dataset, of some 1,000 samples."""
    prefix = str(tmp_path_factory.mktemp("corpus") / "tokens")
    run_world(1, "tests.integration.bodies:write_corpus", prefix=prefix, documents=300, seed=1, vocab_size=255)
    return prefix


@pytest.fixture(scope="session")
def data(corpus) -> dict:
    """Flags of that dataset."""
    return dict(data_path=[corpus], split="90,5,5")
