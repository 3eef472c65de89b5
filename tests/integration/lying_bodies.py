"""Bodies about groups on a device that lies: see :mod:`tests.lying` and :mod:`tests.worlds`."""

from __future__ import annotations

import os
import threading
import time

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.pretraining.process import initialize
from moc.runtime.collectives import gather, sum_over_workers
from moc.runtime.device import copy_to_host
from moc.runtime.groups import Groups
from moc.runtime.job import Job, World
from moc.runtime.progress import PROGRESS, progress
from tests import lying
from tests.integration.group_operations import (
    RANK,
    SIZE,
    TIMEOUT,
    coalesced,
    collectives,
    objects,
    outcome,
    pairs,
    store_at,
)
from tests.replicas import replicas_world

CPU = torch.device("cpu")


def lying_groups(**lies) -> Groups:
    lying.install(lying.Lies(**lies))
    groups = Groups(int(os.environ[RANK]), int(os.environ[SIZE]), "nccl", TIMEOUT, CPU)
    groups.install()
    return groups


def world() -> World:
    rank, size = dist.get_rank(), dist.get_world_size()
    return replicas_world(rank, size, backend="nccl")


def begin_together(groups: Groups, store: dist.Store, generation: int) -> None:
    """Begins a generation, and waits until all have, so that its end interrupts no connection."""
    groups.begin(store, generation)
    store.set(f"begun {generation} {dist.get_rank()}", "")
    store.wait([f"begun {generation} {rank}" for rank in range(dist.get_world_size())])


def abort_all(groups: Groups, store: dist.Store) -> threading.Thread:
    """Ends the generation two seconds after all workers have called this function."""

    def abort() -> None:
        store.set(f"waits {dist.get_rank()}", "")
        store.wait([f"waits {rank}" for rank in range(dist.get_world_size())])
        time.sleep(2.0)
        groups.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    return thread


def operations(port: int) -> list:
    """Returns the results of collectives on lying groups, in two generations.

    Transfers of :func:`tests.integration.group_operations._point_to_point` are not batched, and all receive first: on a
    communicator that is connected eagerly they follow each other, and wait for ever.
    """
    groups, told = lying_groups(), []
    dist.monitored_barrier = lambda group, timeout: dist.barrier(group)  # gloo's alone
    of_groups = [None, *pairs()]
    for generation in range(2):
        groups.begin(store_at(port), generation)
        told.append(
            {f"{i} {f.__name__}": f(group) for i, group in enumerate(of_groups) for f in (collectives, objects)}
            | {f"{i} coalesced": coalesced(group) for i, group in enumerate(of_groups)}
        )
    groups.destroy()
    return told


def vote_while_a_peer_is_gone(port: int, when: str) -> str:
    """Returns the result of a commit all-reduce without a peer: it ``never`` joins, or its reduction was cut off."""
    groups = lying_groups(completes=1.0)
    groups.begin(store_at(port), 0)
    gradient = torch.ones(4)
    if dist.get_rank() == 1 and when == "reduce":
        os._exit(0)
    if when == "reduce":
        dist.all_reduce(gradient)  # completes, with garbage
    if dist.get_rank() == 1:
        os._exit(0)
    ending = threading.Timer(0.5, groups.abort)
    ending.start()
    told = outcome(lambda: sum_over_workers({"norm": gradient.square().sum(), "stop": 0.0}, world()))
    ending.join()
    return told


def believe(port: int, rounds: int) -> list:
    """Whether completed commit all-reduces are valid on all workers; generations end at random moments."""
    groups, told = lying_groups(seed=rounds), []
    chance = torch.Generator().manual_seed(int(os.environ[RANK]))
    store = store_at(port)
    for generation in range(rounds):
        begin_together(groups, store, generation)
        ending = threading.Timer(torch.rand((), generator=chance).item() * 0.05, groups.abort)
        ending.start()
        iteration, problem = 0, ""
        while not problem:
            gradient = torch.full((64,), float(iteration + dist.get_rank()))
            problem = outcome(lambda gradient=gradient: dist.all_reduce(gradient))
            votes: list = []
            problem = problem or outcome(
                lambda gradient=gradient, votes=votes: votes.append(sum_over_workers({"sum": gradient.sum()}, world()))
            )
            if not problem:
                size = dist.get_world_size()
                assert votes == [{"sum": 64.0 * size * (size * iteration + sum(range(size)))}], (iteration, votes)
                iteration += 1
        told.append((iteration, problem))
        ending.join()
    groups.destroy()
    return told


def cut_off_batch(port: int) -> list:
    """Ends a generation within a batch; returns the next one's reduction."""
    groups, store = lying_groups(), store_at(port)
    begin_together(groups, store, 0)
    try:
        with dist._coalescing_manager(dist.group.WORLD, CPU):
            groups.abort()
            dist.all_reduce(torch.ones(1))
    except RuntimeError:
        pass
    groups.begin(store, 1)
    summed = torch.ones(1)
    dist.all_reduce(summed)
    return summed.tolist()


def alone(port: int) -> list:
    """In which thread a group of one rank connects."""
    seen: list[str] = []
    connect = lying.groups.LyingBackend.eager_connect_single_device

    def connecting(self, device):
        seen.append(threading.current_thread().name)
        connect(self, device)

    lying.groups.LyingBackend.eager_connect_single_device = connecting
    groups = lying_groups()
    mine = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    groups.begin(store_at(port), 0)
    before = len(seen)
    value = torch.ones(1)
    dist.all_reduce(value, group=mine)
    return [before, len(seen), set(seen) == {"deputy"}, value.tolist()]


def seconds_until_free(port: int) -> float:
    """How long enqueuing is impossible after a peer has died and the generation was ended."""
    groups = lying_groups(completes=1.0)
    groups.begin(store_at(port), 0)
    if dist.get_rank() == 1:
        os._exit(0)
    begun, value = time.monotonic(), torch.ones(1)
    dist.all_reduce(value)
    value.tolist()
    threading.Timer(0.2, groups.abort).start()
    while not outcome(lambda: dist.all_reduce(torch.ones(1))):
        value.add(1)
    return time.monotonic() - begun


def two_on_one_device(port: int) -> str:
    """Returns the errors of two ranks on one device."""
    os.environ["LOCAL_RANK"] = "0"
    groups = lying_groups()
    try:
        groups.begin(store_at(port), 0)
    except RuntimeError as error:
        return str(error)
    return ""


def gather_of_some(port: int) -> list:
    """Gathers objects among members of a group on the device, while the others do something else."""
    groups = lying_groups()
    pair = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)][dist.get_rank() // 2]
    groups.begin(store_at(port), 0)
    told = [gather((dist.get_rank(), "text"), pair) for _ in range(2 if dist.get_rank() < 2 else 1)]
    groups.destroy()
    return told


def lost_while_connecting(port: int) -> str:
    """The second worker is lost when both have arrived, and has connected nothing."""
    groups, store = lying_groups(), store_at(port)
    if dist.get_rank() == 1:
        store.set("generation0/all/1", b"")
        os._exit(0)
    threading.Timer(1.0, groups.abort).start()
    return outcome(lambda: groups.begin(store, 0))


def one_is_slow(port: int) -> list[bool]:
    """Whether a worker reports that it waits, while another one is slow, and afterwards."""
    groups, told = lying_groups(), []
    groups.begin(store_at(port), 0)
    progress("step")
    gather(None)
    if dist.get_rank() == 1:
        time.sleep(1.0)
    seen = threading.Timer(0.5, lambda: told.append(PROGRESS.report()["waits"]))
    seen.start()
    gradient = torch.ones(8)
    if dist.get_rank() == 0:
        dist.all_reduce(gradient)
    seen.join()
    if dist.get_rank() == 1:
        dist.all_reduce(gradient)
    gradient.tolist()
    told.append(PROGRESS.report()["waits"])
    gather(None)
    return told


def votes_of_other_worlds(port: int) -> list[float]:
    """Runs a commit all-reduce of three workers, and then one of two of them."""
    mine, groups, told = int(os.environ[RANK]), lying_groups(), []
    for generation, there in enumerate([(0, 1, 2), (0, 2)]):
        if mine in there:
            if generation:
                groups.change_rank(there.index(mine), len(there))
            groups.begin(store_at(port), generation)
            told.append(sum_over_workers({"workers": 1.0}, world())["workers"])
    return told


def connections(port: int, flags: dict) -> tuple[list[int], list[str]]:
    """Groups of several workers that are connected when a generation begins, and after one was used; and errors."""
    groups, told = lying_groups(), []

    def connected() -> int:
        found = [group for group in groups._groups if group.backend == "nccl" and group.size() > 1]
        return sum(group.connection is not None and group.connection.connect_later is None for group in found)

    groups._collectives_only = initialize.COLLECTIVES_ONLY
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=flags["pipeline_model_parallel_size"],
        expert_model_parallel_size=flags["expert_model_parallel_size"],
        create_gloo_process_groups=False,
    )
    begin_together(groups, store_at(port), 0)
    told.append(connected())
    experts = parallel_state.get_expert_model_parallel_group()
    dist.all_reduce(torch.ones(1), group=experts)
    told.append(connected())
    values, peer = torch.ones(1), dist.get_process_group_ranks(experts)[dist.get_rank(experts) - 1]
    batch = [dist.P2POp(dist.isend, values, peer, experts)]
    errors = [outcome(lambda: dist.send(values, peer, group=experts)), outcome(lambda: dist.batch_isend_irecv(batch))]
    gather(None)
    return told, errors


def ring(port: int, unbatched: bool) -> list | str:
    """Receives from the previous worker, if all receive first; ends a generation in which they cannot."""
    groups, store = lying_groups(), store_at(port)
    groups._unbatched = ["ring"] if unbatched else []
    pipeline = groups.new_group(group_desc="ring")
    received = torch.zeros(1)
    for generation in range(2):  # connections of a later one replace those of the first
        begin_together(groups, store, generation)
    rank, size = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % size, (rank + 1) % size
    ending = None if unbatched else abort_all(groups, store)

    def transfer() -> None:
        works = [
            dist.irecv(received, before, group=pipeline),
            dist.isend(torch.full((1,), float(rank)), after, group=pipeline),
        ]
        for work in works:
            work.wait()
        copy_to_host(received)

    problem = outcome(transfer)
    if ending:
        ending.join()
    return problem or received.tolist()


def both_send_first(port: int, batched: bool) -> list | str:
    """Receives on two workers that both send first; ends a generation in which they cannot."""
    groups, store = lying_groups(), store_at(port)
    begin_together(groups, store, 0)
    mine, received, other = torch.full((1,), 1.0 + dist.get_rank()), torch.zeros(1), 1 - dist.get_rank()
    operations = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, received, other)]
    ending = None if batched else abort_all(groups, store)

    def receive() -> None:
        each = dist.batch_isend_irecv(operations) if batched else [o.op(o.tensor, other) for o in operations]
        for work in each:
            work.wait()
        copy_to_host(received)

    problem = outcome(receive)
    if ending:
        ending.join()
    return problem or received.tolist()


def train(port: int, flags: dict) -> list[dict]:
    """The step records of a training whose groups are on the device."""
    from tests.integration import bodies

    def connect(job, backend, timeout, device):
        lying.install()
        kinds = dict(collectives_only=job.collectives_only, unbatched=job.unbatched)
        groups = Groups(job.rank, job.size, backend, timeout, device, **kinds)
        groups.install()
        groups.begin(store_at(port), 0)

    Job.connect = connect
    return bodies.train(flags | dict(distributed_backend="nccl"))["records"]
