"""These tests need one NVIDIA GPU; elsewhere they are skipped with that reason."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    without = pytest.mark.skip(reason="no NVIDIA GPU on this machine")
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(without)
