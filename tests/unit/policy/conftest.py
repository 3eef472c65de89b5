"""Recorded loads of experts, for the tests of policies."""

import pytest

from tests.unit.policy import routing


@pytest.fixture(scope="module")
def trace():
    """Tokens by iteration, layer and expert."""
    if not routing.RECORDED.exists():
        pytest.skip("the recorded loads are not at hand")
    numpy = pytest.importorskip("numpy")
    with numpy.load(routing.RECORDED, allow_pickle=False) as file:
        return file["tokens"].tolist()
