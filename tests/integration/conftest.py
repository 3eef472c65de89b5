"""Data for the tiny model."""

from pathlib import Path

import pytest

from tests.worlds import run_world

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """What is here starts worlds and jobs: the quick round leaves it out."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("slow")


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
