"""Embeddings that are tied across pipeline stages on different nodes: one stage saves them, and gives them back."""

import pytest

from tests.integration.launched import Launched
from tests.integration.snapshot_files import node_memory
from tests.integration.test_precision import BF16
from tests.integration.tiny import train

TIED = dict(num_layers=2, hidden_size=32, seq_length=16, global_batch_size=4, untie_embeddings_and_output_weights=False)
FULL = dict(ckpt_policy="full", snapshot_interval=1)
SPARSE = dict(ckpt_policy="sparse", sparse_window=3)
FAULTS = [
    "kill rank=1 iteration=8 point=before_commit",  # of the first stage; the last one has nothing of the embedding
    "kill rank=3 iteration=11 point=before_commit",
]


@pytest.mark.recovery
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", [FULL, SPARSE], ids=["full", "sparse"])
def test_tied_embedding_stages_resume_on_different_nodes(policy, data, tmp_path):
    flags = data | TIED | BF16 | dict(lr=1e-2, train_iters=14)  # with ZeRO-1: stages cut the embedding elsewhere
    with node_memory() as memory:
        places = dict(ckpt_dir=str(tmp_path / "c"), ckpt_memory_dir=memory, ckpt_tier="memory", node_of_rank="0,0,1,1")
        with Launched("PP2xDP2", flags | policy | places | dict(inject=FAULTS), tmp_path / "job") as job:
            assert job.wait() == 0, job.console[-4000:]
    straight = train("PP2xDP2", flags)
    assert job.records() == [(r["iteration"], r["loss"], r["grad_norm"]) for r in straight.records]
    resumed = job.events("resume")
    assert len(resumed) == 2 and {event["tier"] for event in resumed} == {"memory"}
    assert {event["exact"] for event in job.events("replay")} <= {True}
