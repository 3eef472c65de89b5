"""Storage that does not answer while a node of an elastic job is lost: the recovery does not wait for it."""

import time

import pytest

from moc.store.storage import LocalStorage
from moc.store.store import Store
from tests.integration.elastic_jobs import ITERATIONS, assert_as_of_fixed_members, job_of

pytestmark = pytest.mark.recovery
PROGRAM = "tests/integration/frozen_pretrain_gpt_moe.py"


def test_a_node_is_lost_while_storage_is_frozen(data, tmp_path, record_property):
    """It has the controller, and the worker that lists storage and commits snapshots; one is under way."""
    flags: dict = dict(elastic_everywhere="0", elastic_rebalance_interval=0)
    saves = dict(ckpt_policy="full", snapshot_interval=2, ckpt_keep=99, ckpt_dir=str(tmp_path / "snapshots"))
    frozen = tmp_path / "job" / "frozen"
    with job_of(data, tmp_path, [], program=PROGRAM, layout="DP3", candidates=3, **flags, **saves) as job:
        job.reach(5)
        frozen.touch()
        job.reach(6)
        begun = time.time()
        job.lose(0)
        job.reach(ITERATIONS - 2)
        assert job.iteration == ITERATIONS - 2 and not [*frozen.parent.glob("awaited by *")]
        frozen.unlink()
        assert job.wait() == 0, job.console[-4000:]
        assert job.left() == []
    first = next(event["time"] for event in job.events("iteration") if event["time"] > begun)
    record_property("seconds from the loss to the end of the next iteration", round(first - begun, 2))
    assert_as_of_fixed_members(job, data, layout="DP3", **flags)
    assert {event["tier"] for event in job.events("resume")} == {"live"} and not job.events("storage_awaited")
    assert Store(LocalStorage(tmp_path / "snapshots")).iterations()[-1] == ITERATIONS
