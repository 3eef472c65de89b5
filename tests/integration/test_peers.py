"""``--ckpt-tier peers``: a node is lost with its memory, and its state comes back from the memory of another."""

import shutil
from pathlib import Path

import psutil
import pytest

from benchmarks.live.job import Events
from moc.store.storage import LocalStorage
from moc.store.store import Store
from tests.host_memory import find_memory_storage
from tests.integration.launched import Launched
from tests.integration.snapshot_files import contents, node_memory, start, train
from tests.integration.test_sparse import SMALL
from tests.integration.tiny import SHALLOW, known
from tests.shared import ALL
from tests.worlds import run_world

pytestmark = [pytest.mark.recovery, pytest.mark.timeout(300)]
ITERATIONS = 9


@pytest.fixture(scope="module")
def data(data):
    """Of the dataset, for a model of two layers."""
    return data | SHALLOW


@pytest.fixture
def flags(data, tmp_path):
    """Of a run with a snapshot in each iteration, with copies on other nodes."""
    with node_memory() as memory:
        places = dict(ckpt_dir=str(tmp_path / "snapshots"), ckpt_memory_dir=memory)
        yield data | places | dict(ckpt_policy="full", ckpt_tier="peers", snapshot_interval=1, train_iters=ITERATIONS)


@pytest.fixture
def sparse(flags):
    """The same with windows of three snapshots, of a smaller model."""
    flags.pop("snapshot_interval")
    return flags | SMALL | dict(ckpt_policy="sparse", sparse_window=3, ckpt_blocking=True)


def memory_of(flags: dict, node: str) -> Path:
    return find_memory_storage(flags["ckpt_memory_dir"], flags["ckpt_dir"], node).root


def left_in(flags: dict) -> list[Path]:
    """What nodes have in memory."""
    return [path for path in Path(flags["ckpt_memory_dir"]).rglob("*") if path.is_file()]


def lose(job: Launched, node: int, memory: Path) -> None:
    """A node ends with all its processes and its memory."""
    launcher = psutil.Process(job.launchers[node].pid)
    processes = [launcher, *launcher.children(recursive=True)]
    launcher.kill()
    job.launchers[node].wait()
    assert not psutil.wait_procs(processes, timeout=60)[1]
    shutil.rmtree(memory)


def slow_ways(job: Launched) -> list[psutil.Process]:
    """What the copies between its nodes go through."""
    processes = [p for launcher in job.launchers for p in psutil.Process(launcher.pid).children(recursive=True)]
    return [process for process in processes if "tests.slow_way" in process.cmdline()]


def most_behind(job: Launched) -> int:
    """Iterations that were completed while a snapshot was not safe, at most, until a node was lost."""
    complete, taken, most = 0, set(), 0
    for event in Events(job.log / "events.jsonl").all():
        if event["type"] == "restore":
            break
        if event["type"] == "snapshot":
            taken.add(event["iteration"])
        elif event["type"] == "replicate":
            taken.remove(event["iteration"])
        elif event["type"] == "iteration":
            complete = event["iteration"]
            most = max(most, *(complete - iteration for iteration in taken), 0)
    return most


def test_spare_replaces_node_lost_with_its_memory(flags, data, tmp_path):
    plain = data | dict(
        ckpt_policy="full", snapshot_interval=ITERATIONS, ckpt_dir=str(tmp_path / "plain"), train_iters=ITERATIONS
    )
    expected = [(r["iteration"], r["loss"], r["grad_norm"]) for r in train("PP2xEP2", plain).records]
    slow = dict(nodes=2, spares=1, program="tests/integration/slow_peers_pretrain_gpt_moe.py")  # copies lag behind
    with Launched("PP2xEP2", flags, tmp_path / "job", **slow) as job:
        while not job.events("replicate"):
            job.reach(job.iteration + 1)
        assert len(slow_ways(job)) == 2
        safe = job.events("replicate")[-1]["iteration"]
        lose(job, 1, memory_of(flags, "1"))
        assert job.wait() == 0, job.console[-4000:]
        assert job.records() == expected
    (back,), resumed = job.events("restore"), job.events("resume")[-1]
    assert (back["of"], back["held_by"], back["iteration"]) == ("1", "0", resumed["iteration"])
    assert resumed["tier"] == "memory" and resumed["iteration"] >= safe > 0
    assert job.events("placement")[0]["survival"] == {"1": 1.0, "2": 0.0}
    stored = [contents(Store(LocalStorage(f["ckpt_dir"])), ITERATIONS) for f in (flags, plain)]
    assert stored[0] == stored[1]
    assert not left_in(flags)


def test_node_returning_as_spare_releases_memory(flags, data, tmp_path):
    """Its processes are lost, and not its memory; the others' copies in that are of no use to a spare."""
    with Launched("PP2xEP2", flags, tmp_path / "job", nodes=2, spares=1) as job:
        while not job.events("replicate"):
            job.reach(job.iteration + 1)
        job.lose(1)
        job.tells("node 2 takes its place")
        job.start(1)
        job.tells("node 1 is there, and waits as a spare")
        assert (memory_of(flags, "1") / "of_0").is_dir()
        others = memory_of(flags, "1").with_name("another run's")
        others.mkdir()
        assert job.wait() == 0, job.console[-4000:]
        assert [launcher.wait(60) for launcher in job.launchers] == [0, 0, 0]
    assert not left_in(flags) and list(others.parent.iterdir()) == [others]


def test_each_expert_restores_newest_version_from_memory(flags, data, tmp_path):
    """Of partial snapshots, the node that keeps copies has what older ones alone have, too."""
    flags |= dict(ckpt_policy="pec", pec_k=1, persist_interval=100, train_iters=30, max_snapshot_lag=1)
    with Launched("PP2xEP2", flags, tmp_path / "job", nodes=2, spares=1) as job:
        job.reach(20)
        lose(job, 1, memory_of(flags, "1"))
        assert job.wait() == 0, job.console[-4000:]
    resumed, lost = job.events("resume")[-1], job.events("lost")[-1]
    sources = [tuple(source) for source in resumed["sources"]]
    assert {tier for _, tier in sources} == {"memory"} and len(sources) >= 4, sources
    assert min(iteration for iteration, _ in sources) >= resumed["iteration"] - 9, sources  # all 8 in turn, and a vote
    assert 0 < lost["plt"] < 9 / resumed["iteration"]
    assert {back["of"] for back in job.events("restore")} == {"1"}
    assert not left_in(flags)


def test_window_is_restored_with_newer_snapshots(sparse, data, tmp_path):
    straight = known("PP2xEP2", data | SMALL)
    sparse |= dict(ckpt_blocking=False, max_snapshot_lag=1)
    slow = dict(nodes=2, spares=1, program="tests/integration/slow_peers_pretrain_gpt_moe.py")
    with Launched("PP2xEP2", sparse, tmp_path / "job", **slow) as job:
        job.reach(9)
        lose(job, 1, memory_of(sparse, "1"))
        assert job.wait() == 0, job.console[-4000:]
    assert job.records() == [(r["iteration"], r["loss"], r["grad_norm"]) for r in straight.records]
    resumed, back = job.events("resume")[-1], job.events("restore")
    end = resumed["iteration"]
    assert resumed["sources"] == [[i, "memory"] for i in (end, end - 1, end - 2)] and end % 3 == 1
    assert {(event["of"], event["held_by"]) for event in back} == {("1", "0")}
    assert most_behind(job) == 1
    assert [event["iteration"] for event in back][:3] == [end - 2, end - 1, end]
    assert [event["exact"] for event in job.events("replay")] == [True] * 2
    assert not left_in(sparse)


@pytest.mark.parametrize(("nodes", "replicas", "stage"), [((2, 3), 2, 1), *ALL * [((1,), 1, 0)]])
def test_only_stage_of_lost_nodes_replays(nodes, replicas, stage, sparse, data, tmp_path):
    straight = known("PP2xDP2", data | SMALL)
    logging = dict(upstream_logging=True, replicas=replicas)
    with Launched("PP2xDP2", sparse | logging, tmp_path / "job", nodes=4) as job:
        job.reach(9)
        for node in nodes:
            lose(job, node, memory_of(sparse, str(node)))
        for node in nodes:
            job.start(node)
        assert job.wait() == 0, job.console[-4000:]
    assert job.records() == [(r["iteration"], r["loss"], r["grad_norm"]) for r in straight.records]
    resumed = job.events("resume")[-1]
    assert {event["of"] for event in job.events("restore")} == set(map(str, nodes))
    assert (resumed["stages"], resumed["kept"], resumed["tier"]) == ([stage], 2, "memory")


def test_intact_peer_copies_are_restored_and_damaged_are_not(tmp_path):
    with node_memory() as memory:
        first, second, third = run_world(
            3, "tests.integration.peer_bodies:lose_and_restore", memory=memory, directory=str(tmp_path)
        )
    assert first["copied"] == {"of_1": [1, 2], "of_2": [1, 2], "own": [1, 2]}
    assert first["another copy"] == {"own": [2], "value": 20.0}
    assert second["another copy"]["own"] == [1, 2]
    assert first["gone on"] == {"of_1": [2], "of_2": [2], "own": [2]}
    assert (second["gone on"]["of_0"], third["gone on"]["of_0"]) == ([2], [2])
    assert first["older"] == {"own": [2], "value": 20.0}
    damaged = [text for text in first["messages"] if "damaged: master of w" in text]
    assert len(damaged) == 3 and first["messages"] == second["messages"]
    assert [fields for _, fields in first["events"]] == [
        {"of": "0", "held_by": held_by, "iteration": 2} for held_by in ("2", "1")
    ]


def test_peer_tier_without_launcher_is_refused(flags):
    (result, _) = start("EP2", flags).wait()
    assert result.exit != 0 and "python -m moc.launch" in result.output
