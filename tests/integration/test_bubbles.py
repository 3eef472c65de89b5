"""Copies in the pipeline's bubbles: held up while a stage computes, never longer than until the vote."""

import pytest

from tests.integration.launched import Launched
from tests.integration.snapshot_files import events, node_memory, start, told
from tests.integration.tiny import known

BUBBLE = dict(ckpt_policy="selective", selective_experts=2, selective_hide="bubble", snapshot_interval=1)
SMALL = dict(global_batch_size=4, train_iters=8)


@pytest.mark.parametrize("layout", ["PP2", "interleaved"])
def test_traffic_passes_in_bubbles_and_before_update(layout, data, tmp_path):
    """The run is the same, bit by bit; 0.3 MB of a rank take longer than the iterations, so the gate has work."""
    with node_memory() as memory:
        flags = data | SMALL | BUBBLE | dict(ckpt_tier="memory", ckpt_memory_dir=memory)
        flags |= dict(ckpt_dir=str(tmp_path / "c"), log_dir=str(tmp_path / "log"))
        body = dict(body="bubble_bodies:train_watching_the_gate", bytes_per_s=3e6)
        workers = told(start(layout, flags, **body)).workers
    straight = known(layout, data | SMALL)
    for worker, plain in zip(workers, straight.workers, strict=True):
        assert worker["code"] == 0 and worker["weights"] == plain["weights"]
        assert worker["records"] == plain["records"]
        assert worker["waits"] >= SMALL["global_batch_size"] * SMALL["train_iters"]
        assert (worker["computing"], worker["voting"], worker["updating"]) == ([False], [True], [True])
    taken, trained = events(flags, "snapshot"), events(flags, "iteration")
    assert 0 < sum(one.get("bubble_bytes", 0) for one in taken) <= sum(one["bytes"] for one in taken)
    assert all(0 < one["bubble_s"] for one in trained[2:]) and 0 < trained[-1]["bubble_share"] <= 1


@pytest.mark.recovery
def test_stage_lost_at_closed_gate_blocks_no_other(data, tmp_path):
    with node_memory() as memory:
        flags = data | SMALL | BUBBLE | dict(ckpt_tier="memory", ckpt_memory_dir=memory, train_iters=14)
        faults = ["kill rank=1 iteration=6 point=forward_backward", "kill rank=0 iteration=10 point=forward_backward"]
        with Launched("PP2", flags | dict(ckpt_dir=str(tmp_path / "c"), inject=faults), tmp_path / "job") as job:
            assert job.wait() == 0, job.console[-4000:]
        assert len(job.events("resume")) == 2 and job.iteration == 14
        assert all(event["bubble_s"] > 0 for event in job.events("iteration")[-3:])
