"""Files that flags may name."""

import pytest


@pytest.fixture
def dataset(tmp_path):
    """Prefix of a dataset, empty, whose files exist."""
    for ending in (".bin", ".idx"):
        (tmp_path / f"corpus{ending}").touch()
    return str(tmp_path / "corpus")
