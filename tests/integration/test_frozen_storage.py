"""Storage that does not answer while nodes of an elastic job are lost: recoveries do not wait for it."""

import time

import pytest

from moc.store.storage import LocalStorage
from moc.store.store import Store
from tests.integration.elastic_jobs import ITERATIONS, assert_as_of_fixed_members, job_of

pytestmark = pytest.mark.recovery
PROGRAM = "tests/integration/frozen_pretrain_gpt_moe.py"
FLAGS: dict = dict(elastic_everywhere="0", elastic_rebalance_interval=0)
FROZEN_IN, LOST_IN = 5, 7


def train_with_losses(data, directory, freezes):
    """Loses node 0 in an iteration, and node 3 in the last flush; storage is frozen meanwhile, or not.

    Node 0 has the controller, and the worker that lists storage and commits snapshots; one is under way.

    Returns:
        The job, and the longest stall of a training thread in seconds.
    """
    saves = dict(ckpt_policy="full", snapshot_interval=2, ckpt_keep=99, ckpt_dir=str(directory / "snapshots"))
    frozen = directory / "job" / "frozen"
    with job_of(data, directory, [], program=PROGRAM, candidates=3, **FLAGS, **saves) as job:
        job.is_in(FROZEN_IN, workers=4)
        if freezes:
            frozen.touch()
        job.go_on(FROZEN_IN)
        job.is_in(LOST_IN, workers=4)
        lost_at = time.monotonic()
        job.lose(0)
        job.go_on(LOST_IN)
        job.reach(ITERATIONS - 2)
        assert not [*frozen.parent.glob("awaited by *")]
        (directory / "job" / "may end").touch()
        job.reach(ITERATIONS)
        if freezes:  # otherwise the job ends before a node is lost
            job.lose(3)
            job.tells("training continues on 2 of 4 nodes")
            frozen.unlink()
        assert job.wait() == 0, job.console[-4000:]
        assert job.left() == []
    times = [[*map(float, path.read_text().split())] for path in frozen.parent.glob("ends of iterations of *")]
    after = [[end - lost_at for end in of_thread if end > lost_at] for of_thread in times]
    return job, max(ends[0] for ends in after if ends)


def test_node_loss_during_frozen_storage_recovers(data, tmp_path, monkeypatch, record_property):
    monkeypatch.setenv("TEST_WAITS_IN", f"{FROZEN_IN},{LOST_IN}")
    job, stall = train_with_losses(data, tmp_path / "frozen", True)
    other, usual = train_with_losses(data, tmp_path / "usual", False)
    record_property("seconds of the training thread from the loss to the end of the next iteration", (stall, usual))
    print(f"stall of the training thread: {stall:.2f} s, {usual:.2f} s with storage")
    found, expected = ({key: one for state in of.states() for key, one in state.items()} for of in (job, other))
    assert found and found == expected
    assert_as_of_fixed_members(job, data, **FLAGS)
    assert {event["tier"] for event in job.events("resume")} == {"live"} and not job.events("storage_awaited")
    assert Store(LocalStorage(tmp_path / "frozen" / "snapshots")).iterations()[-1] == ITERATIONS
