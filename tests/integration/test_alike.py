"""``--ckpt-tier peers`` without ZeRO: what nodes hold alike is not sent, and yet comes back, bit by bit."""

import shutil

import pytest

from benchmarks.live.job import Events
from moc.errors import codes_in
from moc.events import problems
from moc.state.operators import Region
from moc.store.shard_file import ShardReader
from moc.store.storage import LocalStorage
from moc.store.store import Store, checkpoint_name
from tests.integration.launched import Launched
from tests.integration.snapshot_files import node_memory, train
from tests.integration.test_peers import left_in, lose, memory_of
from tests.integration.tiny import FLAGS, LAYOUTS, SHALLOW, known
from tests.worlds import run_world

pytestmark = [pytest.mark.recovery, pytest.mark.timeout(300)]
ITERATIONS = 8


@pytest.fixture(scope="module")
def data(data):
    """Of the dataset, for a shallow model without ZeRO."""
    return data | SHALLOW | dict(use_distributed_optimizer=False, train_iters=ITERATIONS)


@pytest.fixture
def flags(data, tmp_path):
    """Of a run with a snapshot in each iteration, with one copy on another node."""
    with node_memory() as memory:
        places = dict(ckpt_dir=str(tmp_path / "snapshots"), ckpt_memory_dir=memory, replicas=1, max_snapshot_lag=1)
        yield data | places | dict(ckpt_policy="full", ckpt_tier="peers", snapshot_interval=1)


def records(layout: str, data: dict) -> list[tuple]:
    return [(r["iteration"], r["loss"], r["grad_norm"]) for r in known(layout, data).records]


def copied(job: Launched) -> tuple[int, int, int]:
    """Bytes of a snapshot, and of its copies those sent and those not sent; the same for all snapshots."""
    taken = {event["iteration"]: event["bytes"] for event in job.events("snapshot")}
    (found,) = {(taken[e["iteration"]], e["bytes"], e.get("not_sent_bytes", 0)) for e in job.events("replicate")}
    return found


def tensors(directory: str) -> dict[tuple[str, str], list]:
    """All that the last snapshot in storage has, each element once."""
    store = Store(LocalStorage(directory))
    names = store.read_manifest(ITERATIONS).files
    reader = ShardReader(
        [store.storage.open_blob(f"{checkpoint_name(ITERATIONS)}/{name}") for name in names], verifies=True
    )
    shapes = {(s.box.name, s.box.slot): s.box.global_shape for s in reader.sources()}
    return {key: reader.read_region(*key, Region((0,) * len(shape), shape)).tolist() for key, shape in shapes.items()}


def test_expert_replicas_survive_lost_node_memory(flags, data, tmp_path):
    """Of four nodes every other one has the same experts: only headers of files are sent."""
    expected = records("DP4xEP2", data)
    with Launched("DP4xEP2", flags, tmp_path / "job", nodes=4) as job:
        while len(job.events("replicate")) < 4:
            job.reach(job.iteration + 1)
        safe = job.events("replicate")[-1]["iteration"]
        for node in range(4):
            job.lose(node)
        shutil.rmtree(memory_of(flags, "1"))
        for node in range(4):
            job.start(node)
        assert job.wait() == 0, job.console[-4000:]
    assert job.records() == expected
    resumed, (back,) = job.events("resume")[-1], job.events("restore")
    assert (resumed["tier"], back["of"], back["held_by"]) == ("memory", "1", "3") and resumed["iteration"] >= safe
    placement = job.events("placement")[0]
    assert placement["groups"] == [["0", "2"], ["1", "3"]] and placement["survival"]["1"] == 1.0
    everything, sent, not_sent = copied(job)
    assert not_sent == placement["not_sent_bytes"] and sent == everything - not_sent < 0.2 * everything
    assert not job.events("not_alike") and not left_in(flags)


def test_returning_node_has_experts_but_not_dense_state(flags, data, tmp_path):
    plain = train("EP4", data | dict(ckpt_policy="full", snapshot_interval=99, ckpt_dir=str(tmp_path / "plain")))
    with Launched("EP4", flags, tmp_path / "job", nodes=2, spares=1) as job:
        while not job.events("replicate"):
            job.reach(job.iteration + 1)
        lose(job, 1, memory_of(flags, "1"))
        assert job.wait() == 0, job.console[-4000:]
    assert job.records() == [(r["iteration"], r["loss"], r["grad_norm"]) for r in plain.records]
    assert {(back["of"], back["held_by"]) for back in job.events("restore")} == {("1", "0")}
    everything, sent, not_sent = copied(job)
    there = tensors(flags["ckpt_dir"])
    assert there == tensors(str(tmp_path / "plain"))
    assert not_sent == job.events("placement")[0]["not_sent_bytes"] and sent == everything - not_sent
    assert not left_in(flags)


def test_diverging_replicas_are_detected(flags, data, tmp_path):
    size, parallel = LAYOUTS["DP2"]
    flags |= dict(log_dir=str(tmp_path / "log"), node_of_rank="0,1", train_iters=4, persist_interval=100)
    body = "tests.integration.node_bodies:train_and_drift_apart"
    first, second = run_world(size, body, directory=str(tmp_path), flags=FLAGS | parallel | flags, at=2)
    log = Events(tmp_path / "log" / "events.jsonl")
    assert [(event, wrong) for event in log.all() if (wrong := problems(event))] == []
    told = {event["iteration"] for event in log.of("not_alike")}
    assert told and min(told) == 2 and len(log.of("replicate")) > len(told)
    reasons = [event["reason"] for event in log.of("not_alike") if event["iteration"] == 2]
    assert len(reasons) == 2 and all(codes_in(one) == ["replicas-differ"] and "output" in one for one in reasons)
    assert first["copy"] == second["own"] != first["own"] == second["copy"]
