"""A job of MIN to MAX nodes: one is lost, the others continue; it comes back, and is taken in."""

import shutil
from pathlib import Path

import pytest

from tests.integration.launched import Launched
from tests.integration.snapshot_files import node_memory, train
from tests.integration.tiny import SHALLOW
from tests.shared import ALL

pytestmark = pytest.mark.recovery
ITERATIONS = 24
BATCH = dict(global_batch_size=12, micro_batch_size=2)  # for one, two, and three workers


def test_lost_node_is_removed_and_added_when_it_returns(data, tmp_path):
    flags = data | SHALLOW | BATCH | dict(train_iters=ITERATIONS, exit_signal_handler=True)
    expected = [record["loss"] for record in train("DP3", flags).records]
    saved = dict(ckpt_policy="full", snapshot_interval=1, ckpt_dir=str(tmp_path / "snapshots"))
    own = ["--silence-timeout", "20", "--grow-wait", "600"]
    with Launched("DP3", flags | saved, tmp_path / "job", *own, nodes=3, least=1) as job:
        job.reach(4)
        job.lose(1)
        job.tells("node 1 is lost: training continues on 2 of 3 nodes")
        shrunk = job.iteration
        job.reach(shrunk + 3)
        job.start(1)
        job.tells("training continues on 3 of 3 nodes")
        grown = job.iteration
        job.reach(grown + 2)
        assert job.wait() == 0, job.console[-4000:]
        assert job.left() == []
    assert [record[1] for record in job.records()] == pytest.approx(expected, rel=1e-5)
    told = [event["iteration"] for event in job.events("iteration")]
    assert told[told.index(grown) :] == list(range(grown, ITERATIONS + 1))  # nothing is computed twice
    assert [event["world_size"] for event in job.events("start")] == [3, 2, 3]


@pytest.mark.parametrize(
    "layout, nodes, left, policy, close",
    [
        ("DP2", 2, 1, dict(ckpt_policy="full", snapshot_interval=1), 1e-5),
        ("PP2xDP2", 4, 2, dict(ckpt_policy="sparse", sparse_window=2, ckpt_blocking=True), 1e-5),
        *ALL * [("DP3", 3, 2, dict(ckpt_policy="pec", pec_k=2, snapshot_interval=1), 1e-2)],
        ("DP3", 3, 2, dict(ckpt_policy="selective", selective_experts=3, snapshot_interval=1), 1e-2),
    ],
)
def test_state_of_lost_node_is_restored_from_peer_memory(data, tmp_path, layout, nodes, left, policy, close):
    flags = data | SHALLOW | BATCH | dict(train_iters=ITERATIONS)
    expected = [record["loss"] for record in train(layout, flags).records]
    saved = policy | dict(ckpt_tier="peers", persist_interval=1000)
    with node_memory() as memory:
        places = dict(ckpt_dir=str(tmp_path / "snapshots"), ckpt_memory_dir=memory)
        own = ["--silence-timeout", "20", "--grow-wait", "600"]
        with Launched(layout, flags | saved | places, tmp_path / "job", *own, nodes=nodes, least=left) as job:
            job.reach(8)
            lost = job.iteration
            (gone,) = Path(memory).rglob("*-node-1")
            job.lose(1)
            shutil.rmtree(gone)  # as the memory of its machine would be
            job.tells(f"training continues on {left} of {nodes} nodes")
            if layout == "DP2":  # workers do not save when it comes back: they are killed, and have lost nothing either
                job.reach(lost + 3)
                job.start(1)
                job.tells("training continues on 2 of 2 nodes")
            assert job.wait() == 0, job.console[-4000:]
    resumed, *again = job.events("resume")
    assert resumed["tier"] == "memory" and resumed["iteration"] >= lost - 4
    assert [one["tier"] for one in again] == (["memory"] if layout == "DP2" else [])
    assert [record[1] for record in job.records()] == pytest.approx(expected, rel=close)
