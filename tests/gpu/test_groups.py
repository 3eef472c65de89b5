"""Process groups over NCCL that outlive their connections: one GPU, so one rank, through two generations."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]  # public, but not in __all__

from moc.runtime.groups import Aborted, Groups

TIMEOUT = timedelta(seconds=60)


@pytest.fixture
def groups():
    groups = Groups(0, 1, "nccl", TIMEOUT, torch.device("cuda", 0))
    torch.cuda.set_device(0)
    groups.install()
    yield groups
    groups.destroy()
    assert not dist.is_initialized()


def check_operations(group):
    values = torch.arange(4.0, device="cuda")
    dist.all_reduce(values, group=group)
    gathered, received = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
    dist.all_gather_into_tensor(gathered, values, group=group)
    # sent and received by one rank: this hangs unless both are started together
    transfers = [dist.P2POp(dist.isend, gathered, 0, group), dist.P2POp(dist.irecv, received, 0, group)]
    for handle in dist.batch_isend_irecv(transfers):
        handle.wait()
    objects = [None]
    dist.all_gather_object(objects, "text", group=group)
    dist.barrier(group)
    torch.cuda.synchronize()
    assert received.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert objects == ["text"]


def test_operations_work_in_two_generations(groups):
    store, of_one, on_cpu = HashStore(), dist.new_group([0]), dist.new_group([0], backend="gloo")
    for generation in range(2):
        groups.begin(store, generation)
        for group in (None, of_one):
            check_operations(group)
        value = torch.ones(1)
        dist.all_reduce(value, group=on_cpu)
        groups.check()
        ending = threading.Thread(target=groups.abort)
        ending.start()
        ending.join()
        for group in (None, of_one, on_cpu):
            with pytest.raises(Aborted):
                dist.all_reduce(torch.ones(1, device="cpu" if group is on_cpu else "cuda"), group=group)
        with pytest.raises(Aborted):
            groups.check()


def test_operation_in_flight_at_generation_end_is_aborted(groups):
    groups.begin(HashStore(), 0)
    values = torch.ones(1 << 28, device="cuda")
    dist.all_reduce(values)  # connects
    handle = dist.all_reduce(values, async_op=True)
    assert handle is not None  # this rank is in the group
    groups.abort()
    with pytest.raises(Aborted):
        handle.wait()
    torch.cuda.synchronize()  # and the device can go on
    groups.begin(HashStore(), 1)
    check_operations(None)
