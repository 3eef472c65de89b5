"""Bodies that try what torch.distributed can do: see :mod:`tests.worlds`."""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from moc.runtime.groups import Groups

RANK, SIZE = "RANK", "WORLD_SIZE"
TIMEOUT = timedelta(seconds=180)


def store_at(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)


def installed(timeout: timedelta = TIMEOUT) -> Groups:
    """Groups of this worker, known to torch.distributed and not connected."""
    groups = Groups(int(os.environ[RANK]), int(os.environ[SIZE]), "gloo", timeout, torch.device("cpu"))
    groups.install()
    return groups


def outcome(action) -> str:
    """The name of the exception that an action raises; "" if none."""
    try:
        action()
    except Exception as error:
        return type(error).__name__
    return ""


def aborted_soon(groups: Groups, action) -> str:
    """The outcome of an action in the middle of which another thread ends the generation."""
    timer = threading.Timer(0.2, groups.abort)
    timer.start()
    told = outcome(action)
    timer.join()
    return told


def operations(port: int | None, generations: int = 1) -> list[dict]:
    """What each operation of torch.distributed gives, on the world and on pairs; with a port, by our groups."""
    if port is None:
        dist.init_process_group("gloo")
        return [_operations([None, *pairs()])]
    groups, store = installed(), store_at(port)
    of_groups, told = [None, *pairs()], []
    for generation in range(generations):
        groups.begin(store, generation)
        told.append(_operations(of_groups))
    groups.destroy()
    return told


def pairs() -> list:
    size = dist.get_world_size()
    return members(dist.new_group([first, first + 1], timeout=TIMEOUT) for first in range(0, size, 2))


def members(groups) -> list:
    return [group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER]


def _operations(groups: list) -> dict:
    return {f"{i} {f.__name__}": f(group) for i, group in enumerate(groups) for f in (_facts, collectives, objects)} | {
        f"{i} {f.__name__}": f(group) for i, group in enumerate(groups) for f in (_point_to_point, coalesced)
    }


def _facts(group) -> list:
    ranks = dist.get_process_group_ranks(group)
    mine = group or dist.GroupMember.WORLD
    same = dist.get_group_rank(mine, ranks[-1]), dist.get_global_rank(mine, 0)
    return [dist.get_rank(group), dist.get_world_size(group), ranks, same, str(dist.get_backend(group)), mine.size()]


def _values(group) -> torch.Tensor:
    return torch.arange(4 * dist.get_world_size(group), dtype=torch.float32) * (dist.get_rank() + 1)


def collectives(group) -> list:
    size, rank, first = dist.get_world_size(group), dist.get_rank(group), dist.get_process_group_ranks(group)[0]
    told = []

    def tell(operation, out, *args, **kwargs):
        handle = operation(*args, group=group, **kwargs)
        if handle is not None:
            handle.wait()
        told.append([x.tolist() for x in out] if isinstance(out, list) else out.tolist())

    for asynchronous in (False, True):
        values, part = _values(group), torch.zeros(4)
        lists, whole = [torch.zeros(4) for _ in range(size)], torch.zeros(4 * size)
        tell(dist.all_reduce, values, values, async_op=asynchronous)
        tell(dist.all_reduce, values, values, op=dist.ReduceOp.MAX, async_op=asynchronous)
        tell(dist.broadcast, values, values, src=first, async_op=asynchronous)
        tell(dist.all_gather, lists, lists, _values(group)[:4], async_op=asynchronous)
        tell(dist.all_gather_into_tensor, whole, whole, _values(group)[4:8], async_op=asynchronous)
        tell(dist.reduce_scatter_tensor, part, part, _values(group), async_op=asynchronous)
        tell(dist.all_to_all_single, whole, whole, _values(group), async_op=asynchronous)
        tell(dist.gather, lists, _values(group)[:4], lists if rank == 0 else None, dst=first, async_op=asynchronous)
        tell(dist.scatter, part, part, lists if rank == 0 else None, src=first, async_op=asynchronous)
        tell(dist.barrier, part, async_op=asynchronous)
    reduced = _values(group)
    dist.reduce(reduced, first, group=group)
    told.append(reduced.tolist() if rank == 0 else None)
    dist.monitored_barrier(group, timeout=TIMEOUT)
    return told + [functional.all_reduce(_values(group), "sum", group or dist.group.WORLD).tolist()]


def objects(group) -> list:
    size, first = dist.get_world_size(group), dist.get_process_group_ranks(group)[0]
    gathered, sent, scattered = [None] * size, [dist.get_rank(), "text"], [None]
    dist.all_gather_object(gathered, {"rank": dist.get_rank()}, group=group)
    dist.broadcast_object_list(sent, src=first, group=group)
    dist.scatter_object_list(scattered, list(range(size)) if dist.get_rank() == first else None, src=first, group=group)
    return [gathered, sent, scattered]


def _point_to_point(group) -> list:
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    after, before = ranks[(rank + 1) % len(ranks)], ranks[rank - 1]
    got = [torch.zeros(4) for _ in range(3)]
    handles = [dist.irecv(got[0], before, group=group), dist.isend(_values(group)[:4], after, group=group)]
    handles += dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, _values(group)[4:8], after, group),
            dist.P2POp(dist.irecv, got[1], before, group),
        ]
    )
    for handle in handles:
        handle.wait()
    if rank % 2:
        source = dist.recv(got[2], group=group)
        dist.send(got[2] + 1, source, group=group)
    else:
        dist.send(_values(group)[:4], after, group=group)
        dist.recv(got[2], after, group=group)
    return [x.tolist() for x in got]


def coalesced(group) -> list:
    values = [_values(group) for _ in range(3)]
    with dist._coalescing_manager(group, async_ops=True) as handle:
        for value in values:
            dist.all_reduce(value, group=group)
    handle.wait()
    return [value.tolist() for value in values]
