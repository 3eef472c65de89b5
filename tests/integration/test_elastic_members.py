"""An elastic job of MIN to MAX nodes: workers go on in the same processes when nodes are lost, and when nodes come."""

import pytest

from tests.integration.launched import Launched
from tests.integration.test_layouts import CLOSE
from tests.integration.tiny import SHALLOW, known

pytestmark = pytest.mark.recovery
BATCH = dict(global_batch_size=10, micro_batch_size=1, calculate_per_token_loss=True, use_distributed_optimizer=False)
ELASTIC = dict(elastic=True, elastic_slots=3, elastic_rebalance_interval=5)
DROPOUT = dict(hidden_dropout=0.1, attention_dropout=0.1)
OWN = ["--silence-timeout", "5", "--grow-wait", "600"]


def test_nodes_are_lost_and_come(data, tmp_path):
    flags = data | SHALLOW | BATCH | ELASTIC | DROPOUT | dict(train_iters=40)
    expected = known("DP4", flags).records
    saved = dict(ckpt_policy="full", snapshot_interval=1000, ckpt_dir=str(tmp_path / "snapshots"))
    with Launched("DP4", flags | saved, tmp_path / "job", *OWN, nodes=4, least=2) as job:
        job.reach(4)
        first = dict(job.pids)
        job.lose(1)
        job.tells("training continues on 3 of 4 nodes")
        job.reach(job.iteration + 4)
        job.lose(3)
        job.tells("training continues on 2 of 4 nodes")
        job.reach(job.iteration + 4)
        job.start(1)
        job.start(3)
        job.tells("training continues on 4 of 4 nodes")
        job.reach(job.iteration + 3)
        assert job.wait() == 0, job.console[-4000:]
        assert job.left() == []
    print(job.console)
    print(first, job.pids)
    for kind in ("generation", "resume", "migration", "fallback"):
        for e in job.events(kind):
            print(e)
    told = [event["iteration"] for event in job.events("iteration")]
    assert told == list(range(1, 41))
    assert [record[1] for record in job.records()] == pytest.approx([r["loss"] for r in expected], abs=CLOSE)
