"""Process groups that live as long as the process, though their peers do not.

A worker that outlives another keeps its model and its optimizer, and with them every process group that they hold.
So the groups are ours: registered with torch.distributed once, they forward to a backend that is replaced in each
generation (torchft's process groups have the same idea).  Model code, megatron-core and ``torch.distributed`` see
ordinary groups; from the end of a generation to the begin of the next, every use of one raises :class:`Aborted`.

    groups = Groups(rank, size, "gloo", timeout, device)
    groups.install()                                  # torch.distributed is initialised, and new_group is ours
    parallel_state.initialize_model_parallel(...)     # makes groups without connections; talks to nobody
    groups.begin(store, generation=0)                 # connects them
    ...                                               # meanwhile groups.abort() in another thread: Aborted in this one
    groups.begin(store, generation=1)                 # connects them to whoever has these ranks now

**What to trust.**  On the CPU a collective that has returned has done its work.  On a GPU it has been enqueued, and an
abort lets the stream go on over memory that holds anything: synchronise, then call :meth:`Groups.check`; if it does not
raise, what was there before it is good.  :func:`settled` is both, for who has no :class:`Groups`.

**What an exception means.**  :class:`Aborted`: this generation is over.  :class:`Suspicion`, in a generation that
nobody has aborted: a peer may be gone, which is for the controller to confirm.

**The store** is served by another process: connections that this process accepts while it connects would be taken for
its own, and cut with them.  The same goes for TCP connections that another thread opens in that moment.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import Store

from moc.runtime.abort import NCCL_FLAGS
from moc.runtime.generation import Generation, backend_config
from moc.runtime.group import Aborted, Group, Suspicion
from moc.runtime.interruptible import CalledAway

__all__ = ["Aborted", "Group", "Groups", "Suspicion"]

_BACKENDS = ("gloo", "nccl")


class Groups:
    """All process groups of this process, in the generation that is current.

    One thread, the one that computes, calls everything; :meth:`abort` may be called by any.

    Args:
        rank: of this process in the world; it keeps it in all generations.
        size: of the world.
        backend: ``gloo`` or ``nccl``, of groups that name none.
        timeout: of operations of groups that name none.
        device: that this process computes on; what NCCL connects.

    Raises:
        ValueError: there is no such backend or rank.
    """

    def __init__(self, rank: int, size: int, backend: str, timeout: timedelta, device: torch.device):
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not one of a world of {size}: give a rank from 0 to {size - 1}")
        self._rank, self._size, self._backend = rank, size, _checked_backend(backend)
        self._timeout, self._device = timeout, device
        self._groups: list[Group] = []  # of this rank, in order of creation
        self._created = 0  # by all ranks alike
        self._generation: Generation | None = None
        self._over: int | None = None  # generations up to this one are over
        self._lock = threading.Lock()
        self._replaced: dict[str, Callable] = {}  # what torch.distributed had before install()

    def install(self) -> None:
        """From now on torch.distributed is initialised with our world, and ``dist.new_group`` makes our groups.

        Raises:
            RuntimeError: torch.distributed is initialised already.
        """
        if dist.is_initialized():
            raise RuntimeError("torch.distributed is initialised already: install Groups instead of initialising it")
        os.environ.update(NCCL_FLAGS)
        ours = {"new_group": self.new_group, "batch_isend_irecv": _batch_isend_irecv}
        self._replaced = {name: getattr(dist, name) for name in ours}
        _replace(ours)
        world = self.new_group(group_desc="default_pg")
        assert isinstance(world, Group)  # which this rank is in
        c10d._update_default_pg(world)

    def destroy(self) -> None:
        """Frees everything; torch.distributed is not initialised any more.  No other thread may be using a group."""
        if dist.is_initialized():
            dist.destroy_process_group()
        _replace(self._replaced)
        self._end_generation()
        self._groups, self._replaced = [], {}

    @property
    def generation(self) -> int | None:
        """Number of the generation that began last; None before the first."""
        return self._generation.number if self._generation else None

    def check(self) -> None:
        """Does nothing in a generation that goes on.

        Raises:
            Aborted: the current generation is over, or there is none.
        """
        if self._generation is None or self._generation.over:
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
        """As ``dist.new_group``, for all ranks to call in the same order, but silent: only members meet.

        Members meet at once where a generation goes on, and otherwise when the next begins.

        Args:
            ranks: of its members; None for all.
            timeout: of its operations.
            backend: ``gloo``, ``nccl``, or None for that of the world.
            pg_options: ``ProcessGroupNCCL.Options``; gloo has none.
            use_local_synchronization: must be false.
            group_desc: what it is for.
            device_id: ignored; there is one device.
            sort_ranks: whether ranks in the group follow those in the world, or the order of ``ranks``.

        Returns:
            A :class:`Group`, or ``GroupMember.NON_GROUP_MEMBER`` on ranks that are not among ``ranks``.

        Raises:
            ValueError: the ranks or the backend cannot be.
            Aborted, RuntimeError: as in :meth:`begin`, where a generation goes on.
        """
        if use_local_synchronization:
            raise ValueError("groups are named by order of creation: call new_group without use_local_synchronization")
        backend = _checked_backend(backend or self._backend)
        members = self._checked_ranks(range(self._size) if ranks is None else ranks, sort_ranks)
        name = f"group{self._created}"
        self._created += 1
        if self._rank not in members:
            return dist.GroupMember.NON_GROUP_MEMBER
        group = Group(name, members, self._rank, backend, timeout or self._timeout, pg_options, group_desc)
        self._groups.append(group)
        _register(group)
        if self._generation is not None and not self._generation.over:
            self._connect([group], name, members, group.timeout)
        return group

    def begin(self, store: Store | Callable[[], Store], generation: int) -> None:
        """Connects every group anew; all ranks of the world call it.  The generation before ends by this.

        Args:
            store: where the ranks find each other; any prefix, the same for all.  Not closed here.  Or what opens it,
                called where :meth:`abort` does not have to wait for it.
            generation: its number, higher than all before, the same for all.

        Raises:
            Aborted: :meth:`abort` was called meanwhile, or before for this very generation.
            RuntimeError: a peer or the store could not be reached: a suspicion.  The generation has no connections.
        """
        self._end_generation()
        with self._lock:
            if self._over is not None and generation <= self._over:
                raise Aborted(f"generation {generation} is over before it began: wait for the next one")
            self._generation = Generation(generation, store, self._rank, self._device)
        self._groups = [group for group in self._groups if group in c10d._world.pg_map]  # without destroyed ones
        for group in self._groups:
            group.connection = None
            # an exception between start and end of coalescing leaves this behind: operations would be noted, not done
            c10d._world.pg_coalesce_state.pop(group, None)
        self._connect(self._groups, "all", list(range(self._size)), self._timeout)

    def abort(self, generation: int | None = None) -> None:
        """Ends a generation: whoever waits in it is woken with an exception, and all later use raises ``Aborted``.

        From any thread.  Calling it again, or for a generation that is over already, does nothing.

        Args:
            generation: that ends, with all before it; None for the current one.  Given, a :meth:`begin` of it that
                comes late raises at once, instead of waiting for ranks that will not come.

        Raises:
            RuntimeError: NCCL could not be aborted: this process has to be replaced.
        """
        with self._lock:
            current = self._generation
            if generation is None:
                if current is None:
                    return
                generation = current.number
            self._over = generation if self._over is None else max(self._over, generation)
            if current is None or current.number > self._over:
                return
            current.over = True
        current.end()

    def _end_generation(self) -> None:
        self.abort()
        if self._generation is not None:
            self._generation.drop()

    def _connect(self, groups: list[Group], key: str, ranks: list[int], timeout: timedelta) -> None:
        generation = self._generation
        assert generation is not None  # it has begun
        try:
            connections = generation.deputy.do(lambda: generation.connect(groups, key, ranks, timeout))
        except (CalledAway, RuntimeError) as error:
            if generation.over:
                raise Aborted(f"generation {generation.number} ended while it began: wait for the next one") from error
            raise
        generation.keep(connections)
        for group, connection in zip(groups, connections, strict=True):
            assert connection.store is not None  # it is new
            group.connection = connection
            c10d._world.pg_map[group] = (group.backend, connection.store)

    def _checked_ranks(self, ranks: Iterable[int], sort: bool) -> list[int]:
        members = sorted(ranks) if sort else list(ranks)
        strangers = [rank for rank in members if not 0 <= rank < self._size]
        if strangers or not members or len(set(members)) != len(members):
            raise ValueError(f"a group has different ranks from 0 to {self._size - 1}, each once, and not {members}")
        return members


def settled(device: torch.device) -> None:
    """Returns when all that was begun on a device is done, and is what it was to be.

    Args:
        device: of this process.

    Raises:
        Aborted: the generation of our groups is over, so it may be anything.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    world = dist.group.WORLD
    if isinstance(world, Group):
        world.live()


def _checked_backend(backend: str) -> str:
    if str(backend) not in _BACKENDS:
        raise ValueError(f"groups cannot use the backend {backend}: choose one of {', '.join(_BACKENDS)}")
    return str(backend)


def _replace(functions: dict[str, Callable]) -> None:
    for name, function in functions.items():
        setattr(dist, name, function)
        setattr(c10d, name, function)


def _register(group: Group) -> None:
    """Enters a group into the tables of torch.distributed, as ``dist.new_group`` does."""
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


def _batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
    """As ``dist.batch_isend_irecv``, which starts transfers of NCCL together only for groups of torch's own class.

    One by one, two ranks that each send first would wait for each other.
    """
    group, device = p2p_op_list[0].group, p2p_op_list[0].tensor.device
    if not (isinstance(group, Group) and group._get_backend(device).supports_coalescing):
        return _torch_batch_isend_irecv(p2p_op_list)
    c10d._check_p2p_op_list(p2p_op_list)
    with c10d._coalescing_manager(group, device, async_ops=True) as handles:
        for op in p2p_op_list:
            peer = {"group_dst" if op.op is dist.isend else "group_src": op.group_peer}
            op.op(op.tensor, group=op.group, tag=op.tag, **peer)
    return handles.works


_torch_batch_isend_irecv = dist.batch_isend_irecv
