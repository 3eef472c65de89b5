"""Our own launcher: workers are killed, the others live on, and the run ends as if nothing had been."""

import pytest

from tests.integration.launched import Launched
from tests.integration.snapshot_files import node_memory

ITERATIONS = 24


def flags(data: dict, directory, memory: str, **more) -> dict:
    snapshots = dict(ckpt_policy="full", ckpt_tier="memory", snapshot_interval=1, ckpt_memory_dir=memory)
    return data | snapshots | dict(ckpt_dir=str(directory / "snapshots"), train_iters=ITERATIONS) | more


@pytest.mark.recovery
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["PP2xEP2"])
def test_workers_are_killed_and_nobody_can_tell(layout, data, tmp_path):
    with node_memory() as memory:
        fault_free = Launched(layout, flags(data, tmp_path / "a", memory), tmp_path / "a")
        assert fault_free.wait() == 0, fault_free.console[-4000:]
        job = Launched(layout, flags(data, tmp_path / "b", memory), tmp_path / "b")
        for iteration, ranks in ((5, [1]), (10, [0]), (15, [2, 3])):
            job.reach(iteration)
            before = job.pids
            job.kill(*ranks)
            job.reach(iteration + 3)
            assert {rank for rank, pid in job.pids.items() if pid != before[rank]} == set(ranks)
        assert job.wait() == 0, job.console[-4000:]
    assert job.end_state() == fault_free.end_state()
