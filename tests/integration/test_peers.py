"""``--ckpt-tier peers``: a node is lost with its memory, and its state comes back from the memory of another."""

import os
import shutil
from pathlib import Path

import psutil
import pytest

from moc.store.places import LocalPlace
from moc.store.store import Store
from moc.store.tiers import memory_place
from tests.integration.launched import Launched
from tests.integration.snapshot_files import contents, node_memory, start, train

pytestmark = [pytest.mark.recovery, pytest.mark.timeout(300)]
ITERATIONS = 14


@pytest.fixture
def flags(data, tmp_path):
    """Of a run with a snapshot in each iteration, with copies on other nodes."""
    with node_memory() as memory:
        places = dict(ckpt_dir=str(tmp_path / "snapshots"), ckpt_memory_dir=memory)
        yield data | places | dict(ckpt_policy="full", ckpt_tier="peers", snapshot_interval=1, train_iters=ITERATIONS)


def memory_of(flags: dict, node: str) -> Path:
    return memory_place(flags["ckpt_memory_dir"], flags["ckpt_dir"], node).root


def lose(job: Launched, node: int, memory: Path) -> None:
    """A node ends with all its processes and its memory."""
    launcher = psutil.Process(job.launchers[node].pid)
    processes = [launcher, *launcher.children(recursive=True)]
    launcher.kill()
    job.launchers[node].wait()
    assert not psutil.wait_procs(processes, timeout=60)[1]
    shutil.rmtree(memory)


def test_a_node_is_lost_with_its_memory(flags, data, tmp_path):
    plain = data | dict(ckpt_policy="full", snapshot_interval=ITERATIONS, ckpt_dir=str(tmp_path / "plain"))
    expected = [(r["iteration"], r["loss"], r["grad_norm"]) for r in train("PP2xEP2", plain | _length()).records]
    with Launched("PP2xEP2", flags, tmp_path / "job", nodes=2) as job:
        for iteration, node in ((5, 1), (9, 0)):
            if node == 0:
                continue
            job.reach(iteration)
            safe = job.events("replicate")[-1]["iteration"]
            lose(job, node, memory_of(flags, str(node)))
            job.start(node)
        assert job.wait() == 0, job.console[-4000:]
        assert job.records() == expected
    (back,) = job.events("restore")
    resumed = job.events("resume")[-1]
    assert resumed["tier"] == "memory" and resumed["iteration"] == back["iteration"] >= safe > 0
    assert (back["of"], back["held_by"]) == ("1", "0")
    assert job.events("placement")[0]["survival"] == {"1": 1.0, "2": 0.0}
    stored = [contents(Store(LocalPlace(f["ckpt_dir"])), ITERATIONS) for f in (flags, plain)]
    assert stored[0] == stored[1]
    assert not [path for path in Path(flags["ckpt_memory_dir"]).rglob("*") if path.is_file() and path.name != ".lock"]


def _length() -> dict:
    return dict(train_iters=ITERATIONS)


def test_who_could_not_keep_copies_says_so(flags):
    (result, _) = start("EP2", flags).wait()
    assert result.exit != 0 and "python -m moc.launch" in result.output


def test_more_copies_than_nodes_are_refused(flags, tmp_path):
    with Launched("EP2", flags | dict(replicas=1), tmp_path / "job") as job:
        assert job.wait() == 2 and "--replicas 1 is more than the 0 other nodes" in job.console
