"""A job is asked to stop while a generation changes: it becomes whole, saves the last iteration, and ends with 75."""

import signal

import pytest

from moc.inspect import verify
from moc.runtime.termination import RESUME_REMEDY
from moc.store.storage import LocalStorage
from moc.store.store import Store
from tests.integration.elastic_jobs import FLAGS, ZERO
from tests.integration.launched import Launched
from tests.integration.snapshot_files import node_memory
from tests.integration.tiny import SHALLOW
from tests.shared import ALL

pytestmark = pytest.mark.recovery
LOST = 5  # iteration in which a node is lost
PLAIN = SHALLOW | dict(global_batch_size=12, micro_batch_size=1, train_iters=16, use_distributed_optimizer=False)


def job_of(data, tmp_path, layout, faults, **how):
    """A job that takes no snapshot before it ends, unless flags say so."""
    own = ["--silence-timeout", "20", "--grow-wait", "600"]
    nodes = {name: how.pop(name) for name in ("nodes", "least", "spares") if name in how}
    saved = dict(ckpt_policy="full", snapshot_interval=100, ckpt_dir=str(tmp_path / "snapshots"))
    flags = data | saved | dict(exit_signal_handler=True, inject=faults) | how
    program = "losing_pretrain_gpt_moe.py" if nodes else "held_pretrain_gpt_moe.py"
    return Launched(layout, flags, tmp_path / "job", *own, **nodes, program=f"tests/integration/{program}")


def stopped(job, tmp_path):
    """Waits until the job has ended with 75; returns it, and its snapshots."""
    assert job.wait() == 75, job.console[-4000:]
    assert job.left() == []
    return job, Store(LocalStorage(tmp_path / "snapshots")).iterations()


def lost_and_stopped(data, tmp_path, *what, **how):
    """As :func:`stopped`, of a job that loses node 1."""
    with job_of(data, tmp_path, *what, **how) as job:
        job.is_lost(1)
        return stopped(job, tmp_path)


def assert_that_all_is_saved(job, saved, lost=LOST):
    """The snapshot is of the last iteration that was committed, and another one is not computed."""
    assert saved == [lost - 1] == [job.iteration]
    (left,) = job.events("exit")
    assert (left["iteration"], left["reason"], left["code"]) == (lost - 1, "signal", 75)
    assert "Traceback" not in job.console


def asked(point, *nodes):
    """Faults by which nodes are asked to stop at a point after the loss."""
    return [f"term node={node} iteration={LOST} point={point}" for node in nodes]


@pytest.mark.parametrize("point", ["ready", *ALL * ["rebalancing", "landed", "loaded"]])
@pytest.mark.parametrize("zero", [False, *ALL * [True]])
def test_remaining_nodes_of_elastic_job_save_and_exit(data, tmp_path, point, zero):
    faults = [f"kill node=1 iteration={LOST}", *asked(point, 0, 2)]
    flags = FLAGS | (ZERO if zero else {})
    job, saved = lost_and_stopped(data, tmp_path, "DP3", faults, nodes=3, least=2, **flags)
    assert "training continues on 2 of 3 nodes" in job.console
    assert_that_all_is_saved(job, saved)
    assert verify.main([str(tmp_path / "snapshots")]) == 0


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 stops a job that is about to meet nodes that have come")
def test_scale_up_commit_saves_without_joining_nodes(data, tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_WAITS_IN", "5")
    faults = ["kill node=1 iteration=3", *asked("draining", 0, 2)]
    flags = FLAGS | dict(elastic_rebalance_interval=0, elastic_slots=4)
    with job_of(data, tmp_path, "DP3", faults, nodes=3, least=2, **flags) as job:
        job.is_in(5, workers=2)
        job.start(1)
        job.tells("new nodes are ready")
        job.go_on(5)
        assert_that_all_is_saved(*stopped(job, tmp_path), lost=6)
    assert "the job is to stop, and meets no more" in job.console


@pytest.mark.parametrize("point", ["rebuilding", *ALL * ["ready", "loaded"]])
def test_spare_replaces_lost_node_before_final_save(data, tmp_path, point):
    faults = [f"kill node=1 iteration={LOST}", *asked("ready", 0), *asked(point, 1)]
    job, saved = lost_and_stopped(data, tmp_path, "DP2", faults, nodes=2, spares=1, **PLAIN)
    assert "node 2 takes its place" in job.console
    assert_that_all_is_saved(job, saved)


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 asks a spare to stop before it has workers")
def test_spare_requested_before_worker_start_builds_and_saves(data, tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_WAITS_IN", "4")
    with job_of(data, tmp_path, "DP2", [f"kill node=1 iteration={LOST}"], nodes=2, spares=1, **PLAIN) as job:
        job.is_in(4, workers=2)
        job.launchers[2].send_signal(signal.SIGTERM)
        job.is_lost(1)
        job.go_on(4)
        assert_that_all_is_saved(*stopped(job, tmp_path))
    assert [event["generation"] for event in job.events("generation")] == [1]  # no worker died of the signal


def test_lost_worker_is_replaced_before_all_save_and_exit(data, tmp_path):
    faults = [f"kill rank=1 iteration={LOST}", f"term rank=0 iteration={LOST} point=ready"]
    with job_of(data, tmp_path, "DP2", faults, **PLAIN) as job:
        assert_that_all_is_saved(*stopped(job, tmp_path))
    assert job.events("generation")[0]["reason"] == "worker 1 was killed by signal 9"


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 loses what others had while all are about to save")
def test_absent_node_reports_resume_point(data, tmp_path):
    faults = [f"kill node=1 iteration={LOST}", *asked("ready", 0)]
    flags = PLAIN | dict(snapshot_interval=2, ckpt_blocking=True)
    job, saved = lost_and_stopped(data, tmp_path, "DP2", faults, nodes=2, **flags)
    assert saved == [2, 4] and job.iteration == 4
    assert "node 1 is missing" in job.console and RESUME_REMEDY in job.console


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 starts workers anew who are about to save")
@pytest.mark.parametrize("tier", ["disk", "peers"])
def test_replacements_save_state_only_in_memory(data, tmp_path, tier):
    flags = PLAIN | dict(ckpt_tier=tier, snapshot_interval=1, ckpt_blocking=True)
    faults = [f"kill node=1 iteration={LOST}", *asked("rebuilding", 0, 2)]
    with node_memory() as memory:
        flags |= dict(persist_interval=100, ckpt_memory_dir=memory) if tier == "peers" else {}
        job, saved = lost_and_stopped(data, tmp_path, "DP3", faults, nodes=3, least=2, **flags)
    assert saved[-1] == LOST - 1 == job.iteration
    assert bool(job.events("exit")) == (tier == "peers") != ("with nothing to save" in job.console)
