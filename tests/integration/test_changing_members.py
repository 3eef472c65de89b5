"""A job of MIN to MAX nodes: one is lost, the others continue; it comes back, and is taken in."""

import pytest

from tests.integration.launched import Launched
from tests.integration.snapshot_files import train
from tests.integration.tiny import SHALLOW

pytestmark = pytest.mark.recovery
ITERATIONS = 24
BATCH = dict(global_batch_size=12, micro_batch_size=2)  # for one, two, and three workers


def test_a_lost_node_is_left_behind_and_taken_in_when_it_comes_back(data, tmp_path):
    flags = data | SHALLOW | BATCH | dict(train_iters=ITERATIONS, exit_signal_handler=True)
    expected = [record["loss"] for record in train("DP3", flags).records]
    saved = dict(ckpt_policy="full", snapshot_interval=1, ckpt_dir=str(tmp_path / "snapshots"))
    own = ["--silence-timeout", "5", "--grow-wait", "600"]
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
