"""Bodies about process groups that outlive their connections: see :mod:`tests.worlds`."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import initialize as stock
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

import moc.runtime.generation
from megatron.pretraining import loop
from moc.runtime.groups import Groups
from moc.runtime.job import Job
from tests.integration import bodies
from tests.integration.group_operations import RANK, SIZE, TIMEOUT, aborted_soon, installed, members, outcome, store_at
from tests.integration.own_program import program_of


def between_generations(port: int) -> dict:
    """Uses groups before the first generation, in one that is over, and when they are destroyed."""
    groups, store = installed(), store_at(port)
    pair, alone, told = dist.new_group([0, 1]), [dist.new_group([rank]) for rank in range(2)], {}
    told["members"] = [group is not dist.GroupMember.NON_GROUP_MEMBER for group in alone]
    told["unconnected"] = outcome(lambda: dist.barrier(pair))
    told["imported before"] = device_mesh.new_group is dist.new_group
    told["fake"] = dist.get_world_size(dist.new_group([0, 1], backend="fake"))
    told["known"] = [dist.is_initialized(), dist.get_rank(), dist.get_world_size(pair), str(dist.get_backend())]
    told["refused"] = [
        outcome(lambda ranks=ranks, more=more: dist.new_group(ranks, **more))
        for ranks, more in (
            ([0, 2], {}),
            ([0, 0], {}),
            ([], {}),
            (None, dict(backend="mpi")),
            (None, dict(use_local_synchronization=True)),
        )
    ]
    groups.begin(store, 0)
    late = dist.new_group([1, 0], sort_ranks=False)
    told["late"] = [_sum(late), dist.get_process_group_ranks(late)]
    split = dist.split_group(split_ranks=[[1, 0]])
    told["split"] = [_sum(split), dist.get_process_group_ranks(split)]
    told["split again"] = outcome(lambda: dist.split_group(late, [[0]]))
    told["going on"] = outcome(groups.check)
    dist.destroy_process_group(late)
    groups.abort()
    each = [pair, None, *members(alone)]  # the last one has no peer that could be gone
    told["split over"] = outcome(lambda: _sum(split))
    told["over"] = [outcome(lambda g=group: _sum(g)) for group in each] + [outcome(groups.check)]
    groups.abort()
    between = dist.new_group([0, 1])
    told["between"] = outcome(lambda: dist.barrier(between))
    told["same number"] = outcome(lambda: groups.begin(store, 0))
    groups.begin(store, 7)
    told["again"] = [_sum(pair), _sum(between), groups.generation]
    groups.destroy()
    told["destroyed"] = [dist.is_initialized(), dist.new_group.__module__]
    dist.init_process_group("gloo", store=dist.PrefixStore("torch", store), rank=_rank(), world_size=2)
    told["torch's own"] = _sum(dist.new_group([0, 1]))
    return told


def move_between_worlds(port: int, generations: int) -> dict:
    """Worlds of three and of two in turns, the second process left out of the latter; groups stay the same objects."""
    mine, groups, told = _rank(), installed(), {"sums": [], "same": True, "usage": []}
    made = [dist.group.WORLD, *_created(3)]
    for generation in range(generations):
        there = (0, 1, 2) if generation % 2 == 0 else (0, 2)
        if mine not in there:
            continue
        if generation:
            groups.change_rank(there.index(mine), len(there))
            told["same"] &= all(a is b for a, b in zip(made, [dist.group.WORLD, *_created(len(there))], strict=True))
        groups.begin(store_at(port), generation)
        told["sums"].append([_sum(group) for group in made] + [dist.get_rank(made[1]), dist.get_world_size(made[1])])
        if generation in (2, generations - 2):  # both of three
            told["usage"].append(_settled(told["usage"][0]["threads"] if told["usage"] else _usage()["threads"]))
    if mine == 0:
        groups.change_rank(0, 1)
        _created(1)
        told["nobody"] = _among_nobodies(groups, port, generations)
    told["in another order"] = outcome(lambda: [groups.change_rank(0, 1), dist.new_group([0], group_desc="another")])
    told["not all"] = outcome(lambda: groups.begin(store_at(port), generations))
    return told


def _among_nobodies(groups: Groups, port: int, generation: int) -> list:
    """Uses a group whose other positions are vacant, before and after the next generation begins."""
    before = dist.new_group([-2, 0, -7], group_desc="before")
    groups.begin(store_at(port), generation)
    after = dist.new_group([0, -1], group_desc="after")
    values = torch.tensor([5.0])
    for group in (before, after):
        dist.all_reduce(values, group=group)
        dist.broadcast(values, src=dist.get_process_group_ranks(group)[-1], group=group)
    told = [(dist.get_rank(group), dist.get_world_size(group)) for group in (before, after)]
    nowhere = outcome(lambda: dist.all_gather_into_tensor(torch.empty(3), values, group=before))
    return [*told, dist.get_process_group_ranks(before), values.item(), nowhere, _sum(dist.group.WORLD)]


def _created(size: int) -> list:
    everybody, *each = [dist.new_group(ranks) for ranks in (range(size), *([rank] for rank in range(size)))]
    return [everybody, *members(each)]


def _rank() -> int:
    return int(os.environ[RANK])


def _sum(group) -> float:
    """The sum of all members' ranks in the world, counted from one."""
    ranks = torch.tensor([_rank() + 1.0])
    dist.all_reduce(ranks, group=group)
    return ranks.item()


def wait_for_a_live_peer(port: int) -> dict:
    """The first worker waits in each kind of operation for the second, and is woken; other sockets stay open."""
    groups, store, told = installed(), store_at(port), {}
    ways = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
        "async all_reduce": lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(),
        "recv": lambda: dist.recv(torch.ones(1), 1),
        "batch": lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.ones(1), 1)])[0].wait(),
        "object": lambda: dist.all_gather_object([None, None], "text"),
        "large": lambda: dist.send(torch.ones(1 << 24), 1),
        "monitored_barrier": lambda: dist.monitored_barrier(timeout=2 * TIMEOUT),
        "coalesced": _never_ending_coalescing,  # the last one: leaves marks in torch's tables
    }
    for generation, (name, wait) in enumerate(ways.items()):
        early = _connected_pair()
        groups.begin(store, generation)
        others = [early, _connected_pair()]
        if _rank() == 0:
            told[name] = aborted_soon(groups, wait)
            told[name] += "" if all(_alive(pair) for pair in others) else ", and sockets of others are dead"
            told[name] += "" if outcome(lambda: dist.barrier()) == "Aborted" else ", and a later call does not raise"
            store.set(f"woken{generation}", b"")
        else:
            store.wait([f"woken{generation}"])
        for ends in others:
            for end in ends:
                end.close()
    groups.begin(store, len(ways))
    told["after"] = _sum(None)
    return told


def _never_ending_coalescing() -> None:
    with dist._coalescing_manager():
        dist.all_reduce(torch.ones(1))
        dist.recv(torch.ones(1), 1)


def _connected_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def _alive(pair: tuple[socket.socket, socket.socket]) -> bool:
    pair[0].sendall(b"x")
    pair[1].settimeout(60)
    return pair[1].recv(1) == b"x"


def suspect(port: int) -> str:
    """Returns the error of the first worker when the second dies and the generation has not been ended."""
    groups = installed()
    groups.begin(store_at(port), 0)
    if _rank() == 1:
        os._exit(0)
    return outcome(lambda: dist.recv(torch.ones(1), 1))


def die_in_the_middle_of_a_message(port: int, operation: str) -> str:
    """The second worker dies in a transfer; if gloo reports nothing to the first, its generation is ended."""
    groups, values = installed(), torch.ones(1 << 26)
    transfer = {
        "all_reduce": lambda: dist.all_reduce(values),
        "send and recv": lambda: dist.send(values, 0) if _rank() else dist.recv(values, 1),
    }[operation]
    groups.begin(store_at(port), 0)
    if _rank() == 1:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    ending, told = threading.Timer(1.0, groups.abort), ""
    ending.start()
    while not told:
        told = outcome(transfer)
    ending.join()
    groups.destroy()
    return told


def hear_nothing_from_gloo(port: int, operation: str) -> str:
    """The first worker waits for the second, which never connects; sockets stay open when their generation ends."""
    moc.runtime.generation.shut_down_sockets = lambda sockets: 0
    groups, store, values, part = installed(), store_at(port), torch.ones(4), torch.ones(2)
    waits = {
        "all_reduce": lambda: dist.all_reduce(values),
        "all_gather": lambda: dist.all_gather_into_tensor(values, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, values),
        "recv": lambda: dist.recv(values, 1),
    }[operation]
    groups.begin(store, 0)
    if _rank() == 1:
        store.get("the first one is back")
        return ""
    threading.Timer(0.5, groups.abort).start()
    told = outcome(waits)
    store.set("the first one is back", "")
    return told


def end_in_the_middle_of_messages(port: int, limit: float) -> list:
    """Generations that end in the middle of large messages; then, whether their threads end after the timeout."""
    groups, store, told = installed(timedelta(seconds=limit)), store_at(port), []
    store.set(f"here {_rank()}", "")
    store.wait([f"here {rank}" for rank in range(int(os.environ[SIZE]))])  # the limit is too short for slow starts
    groups.begin(store, 0)
    before, large = _usage()["threads"], torch.ones(1 << 24)
    for generation in range(1, 5):
        groups.begin(store, generation)
        ending = threading.Timer(0.02 * generation, groups.abort)
        ending.start()
        while not told[generation - 1 :]:
            told += filter(None, [outcome(lambda: dist.all_reduce(large))])
        ending.join()
    groups.begin(store, 5)
    summed = _sum(None)
    return [set(told) <= {"Aborted", "PeerFailure"}, summed, _settled(before)["threads"] - before]


def end_while_beginning(port: int) -> dict:
    """Begins a generation while the second worker connects late, partly, or never."""
    groups, store, told = installed(), store_at(port), {}
    if _rank() == 0:
        told["not at all"] = aborted_soon(groups, lambda: groups.begin(store, 0))
    if _rank() == 1:
        store.set("generation1/all/1", b"")  # arrives, and connects nothing
    else:
        told["half"] = aborted_soon(groups, lambda: groups.begin(store, 1))
        groups.abort(2)
        told["ended before"] = outcome(lambda: groups.begin(store, 2))
    groups.abort(2)
    groups.begin(store, 3)
    groups.abort(2)  # a late notice
    told["then"] = _sum(None)
    store.set(f"done/{_rank()}", b"")
    store.wait(["done/0", "done/1"])
    return told


def wait_longer_than_connecting_may_take(port: int, seconds: float) -> list[str]:
    """Operations that take longer than connecting may, and less than the timeout of the group."""
    from moc.runtime import generation

    generation.CONNECT_TIMEOUT = timedelta(seconds=0.75 * seconds)
    groups = installed()
    groups.begin(store_at(port), 0)
    told = []
    for operation in (lambda: dist.all_reduce(torch.ones(1)), _ping):
        if _rank() == 1:
            time.sleep(seconds)
        told.append(outcome(operation))
    return told


def _ping() -> None:
    if _rank() == 0:
        dist.recv(torch.ones(1), 1)
    else:
        dist.send(torch.ones(1), 0)


def many_generations(port: int, count: int) -> list[dict]:
    """Threads, descriptors and memory (KiB) in the first generation, half way, and in the last; aborts end them."""
    groups, store, told = installed(), store_at(port), []
    of_groups = [None, dist.new_group(None), *members(dist.new_group([rank]) for rank in range(2))]
    for generation in range(count + 1):
        groups.begin(store, generation)
        for group in of_groups:
            _sum(group)
        if generation in (0, count // 2, count):
            told.append(_settled(told[0]["threads"] if told else _usage()["threads"]))
            _sum(None)
        groups.abort()
    return told


def _settled(threads: int) -> dict:
    """Returns the resources of this process once it has at most this many threads, or after a timeout."""
    deadline = time.monotonic() + 60
    while _usage()["threads"] > threads and time.monotonic() < deadline:
        time.sleep(0.05)
    return _usage()


def _usage() -> dict:
    resident = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
    threads, descriptors = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd"))
    return {"threads": threads, "descriptors": descriptors, "memory": resident}


# with megatron-core


def train(flags: dict, port: int) -> dict:
    """As :func:`tests.integration.bodies.train`, on our groups; then one worker dies, and the others survive it.

    Returns:
        What ``bodies.train`` does; with ``died``, what the worker saw, and ``sums``, as of :func:`replace`.
    """
    seen = {}
    groups = _joined_by_training(port)

    def survive(_job):
        store = store_at(port)
        before = [id(group) for group in _groups()]
        seen["died"] = _in_the_middle_of_a_collective(groups, store)
        groups.begin(store, 1)
        assert before == [id(group) for group in _groups()]
        seen["sums"] = _sums()
        parallel_state.destroy_model_parallel()
        groups.destroy()

    loop.shut_down = survive
    return bodies.train(flags) | seen


def replace(flags: dict, port: int, rank: int, of: int) -> list:
    """A fresh process in place of the dead one: the sum of ranks in each of its groups."""
    os.environ.update({RANK: str(rank), SIZE: str(of)})
    _joined_by_training(port, generation=1)
    _, program = program_of(flags)
    Job().connect()
    stock._initialize_distributed(program.embedding_ranks, None, None)
    return _sums()


def _joined_by_training(port: int, generation: int = 0) -> Groups:
    """Makes the program start with our groups in place of torch's."""
    groups = Groups(int(os.environ[RANK]), int(os.environ[SIZE]), "gloo", TIMEOUT, torch.device("cpu"))
    build = stock._initialize_distributed
    Job.connect = lambda *_: groups.install()
    stock._initialize_distributed = lambda *a, **given: (build(*a, **given), groups.begin(store_at(port), generation))
    return groups


def _groups() -> list:
    return list(c10d._world.pg_map)


def _sums() -> list:
    """Returns the ranks of each group, and the sum of its members' values, counted from one."""
    return [[dist.get_process_group_ranks(group), _sum(group)] for group in _groups()]


def _in_the_middle_of_a_collective(groups: Groups, store: dist.Store) -> str:
    """The last worker stays away and is killed: most wait for it, and the first for one that waits."""
    watcher = threading.Thread(target=lambda: (store.clone().wait(["dead"]), groups.abort(0)))
    watcher.start()
    store.set(f"ready/{_rank()}", b"")
    if _rank() == int(os.environ[SIZE]) - 1:
        time.sleep(600)
    action = (lambda: dist.recv(torch.ones(1), 1)) if _rank() == 0 else lambda: dist.all_reduce(torch.ones(1))
    told = outcome(action)
    watcher.join()
    return told + ", " + outcome(lambda: dist.barrier())
