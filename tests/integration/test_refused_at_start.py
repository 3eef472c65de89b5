"""What fewer nodes could not go on with is refused before training, with exit code 2, and leaves nothing behind."""

import pytest

from tests.integration.launched import Launched
from tests.integration.snapshot_files import node_memory

pytestmark = pytest.mark.timeout(240)
ELASTIC = dict(elastic=True, calculate_per_token_loss=True, use_distributed_optimizer=False, global_batch_size=4)
CASES = {
    "slots for everywhere": ("DP2", dict(num_experts=8, elastic_slots=6, elastic_everywhere=5) | ELASTIC, 1, 0),
    "slots for everywhere on MIN nodes": (
        "DP3", dict(num_experts=8, elastic_slots=6, elastic_everywhere=5, elastic_min_replicas=1) | ELASTIC, 3, 2
    ),
    "copies on MIN nodes": ("DP2", dict(ckpt_tier="peers", replicas=1), 2, 1),
    "a layout on MIN nodes": ("PP2", {}, 2, 1),
    "a kernel of GPUs": ("DP2", dict(transformer_impl="transformer_engine"), 1, 0),
    "names of nodes": ("DP2", dict(ckpt_tier="memory", node_of_rank="0,1"), 2, 1),
}  # fmt: skip
NAMED = {
    "slots for everywhere": "--elastic-everywhere 5",
    "slots for everywhere on MIN nodes": "--nnodes 2:",
    "copies on MIN nodes": "--nnodes 1:",
    "a layout on MIN nodes": "--nnodes 1:",
    "a kernel of GPUs": "error: --transformer-impl transformer_engine",
    "names of nodes": "--node-of-rank",
}


@pytest.mark.parametrize("case", CASES)
def test_flags_unsupported_on_fewer_nodes_are_refused_at_start(case, data, tmp_path):
    layout, flags, nodes, least = CASES[case]
    with node_memory() as memory:
        saved = dict(ckpt_policy="full", ckpt_dir=str(tmp_path / "c"), ckpt_memory_dir=memory)
        with Launched(layout, data | saved | flags, tmp_path / "job", nodes=nodes, least=least) as job:
            assert job.wait() == 2, job.console[-4000:]
            assert job.left() == []
    assert NAMED[case] in job.console and "Traceback" not in job.console
    assert not job.events("iteration")
