"""Manages process groups that persist for the life of the process, even if their peers fail.

A surviving worker keeps its model and optimizer, and with them all process groups that they reference.  So we implement
the groups: registered with torch.distributed once, they forward to a backend that is replaced in each generation (as
torchft's process groups do).  Model code, megatron-core and ``torch.distributed`` see ordinary groups.  Between the end
of a generation and the beginning of the next, every use raises :class:`Aborted`.

    groups = Groups(rank, size, "gloo", timeout, device)
    groups.install()                                  # initializes torch.distributed and replaces new_group
    parallel_state.initialize_model_parallel(...)     # creates groups without connections or communication
    groups.begin(store, generation=0)                 # connects them
    ...                                               # groups.abort() in another thread raises Aborted in this one
    groups.begin(store, generation=1)                 # connects them to the processes with these ranks
    groups.move(rank, size)                           # new ranks: groups are created again as the same objects
    parallel_state.destroy_model_parallel(); parallel_state.initialize_model_parallel(...)
    groups.begin(store, generation=2)

**Valid results.**  On the CPU, a collective that has returned is complete.  On a GPU it is only enqueued.  After an
abort by this process or a peer, the stream continues with undefined memory.  :mod:`moc.runtime.device` synchronizes
and checks.  Results up to then are valid once all peers have done so and confirmed it in host memory
(:mod:`moc.runtime.collectives`), in a commit all-reduce or :func:`moc.runtime.collectives.synchronize_group`.

**Exceptions.**  :class:`Aborted`: this generation is over.  :class:`PeerFailure`: the generation was not aborted, but a
peer may be lost, which the controller must confirm.

**Store.**  Another process must serve the store.  Connections that this process accepts while it connects would be
treated as gloo's and shut down with them.  The same holds for TCP connections that another thread opens meanwhile.
"""

from __future__ import annotations

import hmac
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]  # public, but not in __all__
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import Store

from moc.runtime import collectives
from moc.runtime.abort import NCCL_FLAGS
from moc.runtime.device import copy_to_host
from moc.runtime.generation import CallInterrupted, Generation, backend_config
from moc.runtime.process_group import Aborted, Group, PeerFailure
from moc.runtime.progress import PROGRESS

_OBJECT_MAC_BYTES = 32


class ObjectAuthenticationError(RuntimeError):
    """An object was not sent by a worker of this job, in this generation and to this group."""


def authenticated_object_functions(
    token: bytes, scope_of: Callable[[Any], tuple[str, int, str]]
) -> dict[str, Callable]:
    """Returns authenticating versions of the two functions of ``distributed_c10d`` that convert all objects.

    Args:
        token: the job's secret.
        scope_of: returns the job's id, the generation and the name of a group; its argument is None for the world.
    """
    key = hmac.digest(token, b"objects of groups", "sha256")
    to_tensor, to_object = c10d._object_to_tensor, c10d._tensor_to_object

    def mac_of(pickled: bytes, group) -> bytes:
        job, generation, name = scope_of(group)
        return hmac.digest(key, f"{job} {generation} {name} ".encode() + pickled, "sha256")

    def to_authenticated_tensor(obj, device, group, *more):  # torch passes weights_only from 2.14 on
        pickled, _ = to_tensor(obj, torch.device("cpu"), group, *more)
        data = pickled.numpy().tobytes()
        authenticated = torch.frombuffer(bytearray(data + mac_of(data, group)), dtype=torch.uint8)
        authenticated = authenticated.to(
            device, copy=True
        )  # torch resizes it to the largest object, which a buffer does not allow
        return authenticated, torch.tensor([authenticated.numel()], dtype=torch.int64, device=device)

    def to_verified_object(tensor, tensor_size, group, *more):
        data = copy_to_host(tensor).numpy().tobytes()[: int(copy_to_host(tensor_size))]
        pickled, seal = data[:-_OBJECT_MAC_BYTES], data[-_OBJECT_MAC_BYTES:]
        if not hmac.compare_digest(seal, mac_of(pickled, group)):
            _, generation, name = scope_of(group)
            raise ObjectAuthenticationError(
                f"an object in {name} is not of a worker of this job in generation {generation}"
            )
        return to_object(torch.frombuffer(bytearray(pickled), dtype=torch.uint8), len(pickled), group, *more)

    return {"_object_to_tensor": to_authenticated_tensor, "_tensor_to_object": to_verified_object}


__all__ = ["Aborted", "Group", "Groups", "PeerFailure"]

_BACKENDS = ("gloo", "nccl")
_FAKE = "fake"


class Groups:
    """All process groups of this process, in the current generation.

    The compute thread calls every method; any thread may call :meth:`abort`.

    Args:
        rank: global rank of this process, constant over generations unless it moves.
        size: size of the world.
        backend: default backend of a group, ``gloo`` or ``nccl``.
        timeout: default timeout of a group's operations.
        device: compute device of this process, which NCCL connects.
        token: the job's secret, which authenticates pickled objects (:func:`authenticated_object_functions`); or None.
        collectives_only: descriptions of groups used only for collectives, in the same order on all members.  They
            connect at their first use, not at the beginning of a generation.
        unbatched: descriptions of groups whose members transfer to their neighbours outside of batches.

    Raises:
        ValueError: the rank or the backend is invalid.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        backend: str,
        timeout: timedelta,
        device: torch.device,
        token: bytes | None = None,
        collectives_only: Collection[str] = (),
        unbatched: Collection[str] = (),
    ):
        self._rank, self._size, self._backend = _validate_rank(rank, size), size, _validate_backend(backend)
        self._timeout, self._device, self._token = timeout, device, token
        self._collectives_only, self._unbatched = collectives_only, unbatched
        self._groups: list[Group] = []  # of this rank, in order of creation
        self._job = ""
        self._created = 0  # equal on all ranks
        self._recreated: deque[Group] = deque()  # groups that will get other members, in order of creation
        self._generation: Generation | None = None
        self._aborted_generation: int | None = None  # generations up to this one are over
        self._lock = threading.Lock()
        self._replaced: dict[str, Callable] = {}  # torch.distributed's functions before install()

    def install(self) -> None:
        """Initializes torch.distributed with our world group, and replaces ``dist.new_group`` by our function.

        Raises:
            RuntimeError: torch.distributed is already initialized.
        """
        if dist.is_initialized():
            raise RuntimeError("torch.distributed is initialised already: install Groups instead of initialising it")
        os.environ.update(NCCL_FLAGS)
        PROGRESS.use_stream_of(self._device)
        replacements: dict[str, Callable] = {"new_group": self.new_group, "split_group": self.split_group}
        replacements["batch_isend_irecv"] = _batch_isend_irecv
        if self._token is not None:
            replacements |= authenticated_object_functions(self._token, self._object_scope)
        self._replaced = {name: getattr(c10d, name) for name in replacements}
        _replace_functions(replacements)
        world, host = self._create_world_groups()
        c10d._update_default_pg(world)
        collectives.set_host_group(host)

    def _create_world_groups(self) -> tuple[Group, Group | None]:
        """Returns the group of all ranks, and a second group in host memory unless the first uses gloo."""
        world = self.new_group(group_desc="default_pg")
        host = None if self._backend == "gloo" else self.new_group(backend="gloo", group_desc="host_pg")
        assert isinstance(world, Group) and (host is None or isinstance(host, Group))  # every rank is a member
        return world, host

    def _object_scope(self, group: Group | None) -> tuple[str, int, str]:
        target: Any = group or dist.group.WORLD
        # raises if the generation is over, since an object just copied from a device may be undefined
        target.connected_group()
        return self._job, self.generation or 0, target.group_name

    def destroy(self) -> None:
        """Frees all groups and uninitializes torch.distributed.  No other thread may be using a group.

        Raises:
            AbortError: NCCL could not be aborted; torch.distributed is uninitialized nevertheless.
        """
        if dist.is_initialized():
            dist.destroy_process_group()
        _replace_functions(self._replaced)
        collectives.set_host_group(None)
        self._end_generation()
        self._groups, self._replaced = [], {}

    @property
    def generation(self) -> int | None:
        """Number of the latest generation; None before the first."""
        return self._generation.number if self._generation else None

    def check(self) -> None:
        """Raises Aborted if the current generation is over or none has begun."""
        if self._generation is None or self._generation.is_over:
            raise Aborted(f"generation {self.generation} is over: unwind and begin the next one")

    def new_group(
        self,
        ranks: Iterable[int] | None = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options=None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
        device_id: torch.device | None = None,
        sort_ranks: bool = True,
    ):
        """Creates a group like ``dist.new_group``: all ranks call it in the same order, but only members communicate.

        Members connect immediately in a live generation, otherwise at the beginning of the next one.

        Args:
            ranks: global ranks of its members; None for all.  Negative ranks are vacant positions: see
                :class:`moc.runtime.process_group.Group`.
            timeout: timeout of its operations.
            backend: ``gloo``, ``nccl``, or None for the backend of the world group; or ``fake``, torch's backend
                without communication.
            pg_options: ``ProcessGroupNCCL.Options``; gloo has none.
            use_local_synchronization: must be false.
            group_desc: description.
            device_id: ignored; each process has one device.
            sort_ranks: orders group ranks by global rank if no position is vacant; otherwise by ``ranks``.

        Returns:
            A :class:`Group`, or ``GroupMember.NON_GROUP_MEMBER`` on ranks that are not among ``ranks``.

        Raises:
            ValueError: the ranks or the backend are invalid.
            Aborted, RuntimeError: as in :meth:`begin`, in a live generation.
        """
        if use_local_synchronization:
            raise ValueError("groups are named by order of creation: call new_group without use_local_synchronization")
        if backend == _FAKE:
            return self._new_fake_group(ranks, group_desc)
        backend = _validate_backend(backend or self._backend)
        members = self._validate_ranks(range(self._size) if ranks is None else ranks, sort_ranks)
        name = f"group{self._created}"
        self._created += 1
        if self._rank not in members:
            return dist.GroupMember.NON_GROUP_MEMBER
        if self._recreated:
            group = self._recreate(name, members, group_desc)
        else:
            group = Group(
                name,
                members,
                self._rank,
                backend,
                timeout or self._timeout,
                pg_options,
                group_desc,
                collectives_only=group_desc in self._collectives_only,
                unbatched=group_desc in self._unbatched,
            )
        self._groups.append(group)
        _register(group)
        if self._generation is not None and not self._generation.is_over and not group.has_vacant_positions:
            self._connect([group], name, members, group.timeout)
        return group

    def split_group(
        self,
        parent_pg: dist.ProcessGroup | None = None,
        split_ranks: Sequence[Sequence[int]] = (),
        timeout: timedelta | None = None,
        pg_options=None,
        group_desc: str | None = None,
        backend: str | None = None,
    ) -> Group | None:
        """Creates groups like ``dist.split_group``, by :meth:`new_group`: a split communicator ends with its parent.

        Args:
            parent_pg: group of all ranks; None for it.
            split_ranks: ranks of each new group.
            timeout: as for :meth:`new_group`.
            pg_options: as for :meth:`new_group`.
            group_desc: as for :meth:`new_group`.
            backend: as for :meth:`new_group`.

        Returns:
            The group of this rank; None if it is in none.

        Raises:
            ValueError: the parent has not all ranks.
        """
        if parent_pg not in (None, dist.group.WORLD):
            raise ValueError(f"{parent_pg} has not all ranks: split the group of all ranks, or call new_group")
        created = [
            self.new_group(ranks, timeout, backend, pg_options, group_desc=group_desc, sort_ranks=False)
            for ranks in split_ranks
        ]
        return next((group for group in created if isinstance(group, Group)), None)

    def _new_fake_group(self, ranks: Iterable[int] | None, description: str | None):
        """Returns torch's group without communication, such as of a mesh's dimension of size 1."""
        world: Any = c10d._world
        backend, store = world.pg_map[dist.group.WORLD]
        world.pg_map[dist.group.WORLD] = backend, HashStore()  # the world has none before it is connected
        try:
            return self._replaced["new_group"](ranks=ranks, backend=_FAKE, group_desc=description)
        finally:
            world.pg_map[dist.group.WORLD] = backend, store

    def change_rank(self, rank: int, size: int) -> None:
        """Changes this process's rank and the world size, between two generations.

        The program then creates its groups again in the same order.  :meth:`new_group` returns the same objects, which
        the model still references, with other members.

        Raises:
            ValueError: the rank is invalid.
        """
        self._end_generation()
        self._rank, self._size = _validate_rank(rank, size), size
        self._recreated, self._groups, self._created = deque(self._existing()), [], 0
        for group in self._recreated:
            _unregister(group)
        self._create_world_groups()

    def _recreate(self, name: str, members: list[int], description: str | None) -> Group:
        group = self._recreated.popleft()
        if group.group_desc != (description or "undefined"):
            raise RuntimeError(
                f"{description} is created in place of {group}: create groups in the same order as before"
            )
        group.set_members(name, members, self._rank)
        return group

    def _existing(self) -> list[Group]:
        """Returns the groups of this rank that were not destroyed."""
        return [group for group in self._groups if group in c10d._world.pg_map]

    def begin(self, store: Store | Callable[[], Store], generation: int, job: str = "") -> None:
        """Connects every group for a new generation; all ranks of the world call it.  Ends the previous generation.

        Args:
            store: rendezvous store with any prefix, equal on all ranks; not closed here.  A callable opens it in
                the deputy, so that :meth:`abort` need not wait for it.
            generation: number of the generation, higher than all before, equal on all ranks.
            job: ID of the job, equal on all ranks and different from other jobs with the same token.

        Raises:
            Aborted: :meth:`abort` was called meanwhile, or earlier for this generation.
            RuntimeError: a peer or the store could not be reached.  The generation has no connections.
        """
        if self._recreated:
            raise RuntimeError(f"{self._recreated[0]} was not created again after the move to {self._size} ranks")
        self._end_generation()
        self._job = job
        with self._lock:
            if self._aborted_generation is not None and generation <= self._aborted_generation:
                raise Aborted(f"generation {generation} is over before it began: wait for the next one")
            self._generation = Generation(generation, store, self._device)
        self._groups = self._existing()
        for group in self._groups:
            group.connection = None
            # left by an exception within coalescing; operations would be recorded but not issued
            c10d._world.pg_coalesce_state.pop(group, None)
        connectable = [group for group in self._groups if not group.has_vacant_positions]
        self._connect(connectable, "all", list(range(self._size)), self._timeout)

    def abort(self, generation: int | None = None) -> None:
        """Ends a generation: wakes threads that wait in it with an exception, and makes later uses raise ``Aborted``.

        Any thread may call it.  It has no effect on a generation that is over.

        Args:
            generation: generation to end, with all earlier ones; None for the current one.  If given, a later
                :meth:`begin` of it raises immediately, instead of waiting for ranks that will not join.

        Raises:
            AbortError: NCCL could not be aborted, so this process cannot continue.
        """
        with self._lock:
            current = self._generation
            if generation is None:
                if current is None:
                    return
                generation = current.number
            self._aborted_generation = (
                generation if self._aborted_generation is None else max(self._aborted_generation, generation)
            )
            if current is None or current.number > self._aborted_generation:
                return
            current.is_over = True
        current.abort()

    def _end_generation(self) -> None:
        self.abort()
        for group in self._groups:
            if group.connection is not None:
                group.connection.end_batch()
        if self._generation is not None:
            self._generation.drop()

    def _connect(self, groups: list[Group], key: str, ranks: list[int], timeout: timedelta) -> None:
        generation = self._generation
        assert generation is not None  # set by begin()
        try:
            connections = generation.deputy.run(lambda: generation.connect(groups, key, ranks, timeout))
        except (CallInterrupted, RuntimeError) as error:
            if generation.is_over:
                raise Aborted(f"generation {generation.number} ended while it began: wait for the next one") from error
            raise
        generation.add_connections(connections)
        for group, connection in zip(groups, connections, strict=True):
            assert connection.store is not None  # set for a new connection
            group.connection = connection
            c10d._world.pg_map[group] = (group.backend, connection.store)

    def _validate_ranks(self, ranks: Iterable[int], sort: bool) -> list[int]:
        members = list(ranks)
        if sort and min(members, default=0) >= 0:
            members.sort()
        invalid = [rank for rank in members if rank >= self._size]
        if invalid or not members or len(set(members)) != len(members):
            raise ValueError(f"a group has different ranks from 0 to {self._size - 1}, each once, and not {members}")
        return members


def _validate_rank(rank: int, size: int) -> int:
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not one of a world of {size}: give a rank from 0 to {size - 1}")
    return rank


def _validate_backend(backend: str) -> str:
    if str(backend) not in _BACKENDS:
        raise ValueError(f"groups cannot use the backend {backend}: choose one of {', '.join(_BACKENDS)}")
    return str(backend)


def _replace_functions(functions: dict[str, Callable]) -> None:
    """Replaces functions of torch.distributed, also in modules that have imported their names, as DeviceMesh's has."""
    replaced = {name: getattr(c10d, name) for name in functions}
    for module in [*sys.modules.values()]:
        if isinstance(module, ModuleType):
            names = object.__getattribute__(module, "__dict__")  # does not load a lazy module
            for name, function in functions.items():
                if names.get(name) is replaced[name]:
                    names[name] = function


def _register(group: Group) -> None:
    """Registers a group in torch.distributed's tables, as ``dist.new_group`` does."""
    name, tag = group.group_name, f"ptd:{group.group_name}"
    world: Any = c10d._world  # torch declares fewer types than these tables take
    world.pg_map[group] = (group.backend, None)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {global_rank: rank for rank, global_rank in enumerate(group.ranks)}
    world.pg_backend_config[group] = str(backend_config(group.backend))
    world.tags_to_pg.setdefault("", []).append(group)
    world.tags_to_pg.setdefault(tag, []).append(group)
    world.pg_to_tag[group] = tag
    register: Any = c10d._register_process_group  # pyright: ignore[reportPrivateImportUsage]  # of torch's C library
    register(name, group)


def _unregister(group: Group) -> None:
    """Removes a group from torch.distributed's tables, as ``dist.destroy_process_group`` does."""
    world: Any = c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
        table.pop(group, None)
    for tag in ("", world.pg_to_tag.pop(group)):
        world.tags_to_pg[tag].remove(group)
    unregister: Any = c10d._unregister_process_group  # pyright: ignore[reportPrivateImportUsage]  # as above
    unregister(group.group_name)


def _batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
    """Issues a batch like ``dist.batch_isend_irecv``, which coalesces NCCL transfers only for torch's own group class.

    Without coalescing, two ranks that both send first would deadlock.
    """
    group, device = p2p_op_list[0].group, p2p_op_list[0].tensor.device
    if isinstance(group, Group):
        group.check_transfers()
    if not (isinstance(group, Group) and group._get_backend(device).supports_coalescing):
        return _torch_batch_isend_irecv(p2p_op_list)
    c10d._check_p2p_op_list(p2p_op_list)
    with c10d._coalescing_manager(group, device, async_ops=True) as handles:
        for op in p2p_op_list:
            peer = {"group_dst" if op.op is dist.isend else "group_src": op.group_peer}
            op.op(op.tensor, group=op.group, tag=op.tag, **peer)
    return handles.works


_torch_batch_isend_irecv = dist.batch_isend_irecv
