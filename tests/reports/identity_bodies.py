"""What workers of :mod:`tests.reports.test_data_identity` do."""

import os
from pathlib import Path

from tests.integration import bodies


def train_on_nodes(flags: dict, nodes: list[str]) -> dict:
    """Trains as :func:`tests.integration.bodies.train`, each worker in the directory of its node."""
    directory = Path(nodes[int(os.environ["RANK"]) % len(nodes)])
    os.chdir(directory)
    return bodies.train(flags)
