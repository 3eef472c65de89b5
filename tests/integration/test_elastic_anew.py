"""An elastic job whose workers are started anew when a node is lost: without a policy, from the newest ``--save``."""

import pytest

from tests.integration.elastic_jobs import FLAGS
from tests.integration.launched import Launched
from tests.integration.test_layouts import CLOSE
from tests.integration.tiny import known
from tests.shared import ALL

pytestmark = pytest.mark.recovery
SAVED, LOST, ITERATIONS = 4, 6, 12


@pytest.mark.parametrize("zero", [False, *ALL * [True]])
def test_remaining_nodes_resume_from_load_without_policy(data, tmp_path, zero):
    flags = data | FLAGS | dict(train_iters=ITERATIONS, use_distributed_optimizer=zero)
    place = str(tmp_path / "checkpoints")
    saved = dict(save=place, load=place, save_interval=SAVED, inject=[f"kill node=2 iteration={LOST}"])
    own = ["--silence-timeout", "20", "--grow-wait", "600"]
    program = "tests/integration/losing_pretrain_gpt_moe.py"
    with Launched("DP3", flags | saved, tmp_path / "job", *own, nodes=3, least=2, program=program) as job:
        job.reach(SAVED)
        before = job.pids
        job.tells("training continues on 2 of 3 nodes")
        assert job.wait() == 0, job.console[-4000:]
        assert job.left() == []
    assert "restart when nodes are lost or added: they resume from --load" in job.console
    assert all(job.pids[rank] != before[rank] for rank in (0, 1))
    assert [event["world_size"] for event in job.events("start")] == [3, 2]
    told = [event["iteration"] for event in job.events("iteration")]
    assert told == [*range(1, LOST), *range(SAVED + 1, ITERATIONS + 1)]  # what came after the save, again
    expected = [record["loss"] for record in known("DP3", flags).records]
    assert [record[1] for record in job.records()] == pytest.approx(expected, abs=CLOSE)
