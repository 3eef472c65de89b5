"""Faults that a run does to itself: everywhere, in recovery too, and the run ends as if nothing had been."""

from pathlib import Path

import pytest

from moc.store.storage import LocalStorage
from moc.store.store import Store
from tests.integration.launched import Launched
from tests.integration.snapshot_files import contents, node_memory, train
from tests.integration.tiny import SHALLOW

pytestmark = [pytest.mark.recovery, pytest.mark.timeout(300)]
ITERATIONS = 12
FAULTS = [
    "kill rank=1 iteration=3 point=forward_backward",
    "kill rank=1 iteration=3 point=rebuilding",
    "kill rank=0 iteration=2 point=loading",  # which has lost nothing, and is about to fill its state again
    "kill rank=0 iteration=6 point=after_commit",
    "kill ranks=0,1 iteration=9 point=snapshot_finalized",
    "kill rank=0 iteration=12 point=committed",
]
EXPECTED = [
    *[(0, "after_commit"), (0, "committed"), (0, "loading"), (0, "snapshot_finalized")],
    *[(1, "forward_backward"), (1, "rebuilding"), (1, "snapshot_finalized")],
]


@pytest.fixture(scope="module")
def data(data):
    """Of the dataset, for a model of two layers."""
    return data | SHALLOW


def ended_with(directory: Path) -> dict:
    """The hash of everything in the last snapshot."""
    return contents(Store(LocalStorage(directory)), ITERATIONS)


def test_every_injected_fault_occurs_once_without_effect(data, tmp_path):
    common = data | dict(ckpt_policy="full", train_iters=ITERATIONS)
    alone = train("EP2", common | dict(snapshot_interval=ITERATIONS, ckpt_dir=str(tmp_path / "undisturbed"))).records
    with node_memory() as memory:
        places = dict(ckpt_tier="memory", ckpt_memory_dir=memory, ckpt_dir=str(tmp_path / "snapshots"))
        flags = common | places | dict(snapshot_interval=1, inject=FAULTS)
        with Launched("EP2", flags, tmp_path / "job") as job:
            assert job.wait(240) == 0, job.console[-4000:]
            assert job.left() == []
    fired = sorted((event["rank"], event["point"]) for event in job.events("inject"))
    assert fired == EXPECTED, job.console[-4000:]
    assert job.records() == [(r["iteration"], r["loss"], r["grad_norm"]) for r in alone]
    assert ended_with(tmp_path / "snapshots") == ended_with(tmp_path / "undisturbed")
