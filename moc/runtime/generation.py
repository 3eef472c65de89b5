"""Opens, shuts down and frees the connections of a process's groups together, in one generation.

**Interruption.**  gloo cannot always be interrupted.  While connecting, it waits for a dead peer.  A transfer
interrupted in the middle of a message waits for its timeout.  Such calls run in a deputy thread that can be abandoned.
An abandoned thread ends at that timeout.

**Setup.**  Backends are built directly, not by ``init_process_group``.  So an aborted setup leaves no partial entries
in torch's tables, whose counters would differ from the counters of a new process.

**Authentication.**  gloo's sockets accept any client that sends a small number.  So workers list their connections in
the rendezvous store, which authenticates them.  A connection between two workers is listed from both ends.  A
connection without the other end belongs to an unauthenticated peer, and is cut.  Once all workers are connected, the
listening sockets accept no more.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]  # public, but not in __all__
from torch.distributed.distributed_c10d import BackendConfig, PrefixStore, Store
from torch.torch_version import TorchVersion

from moc.runtime.abort import abort_nccl, duplicate_sockets, open_sockets, shut_down_sockets

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend


class CallInterrupted(Exception):
    """The caller was interrupted; the deputy's task, if it has begun, continues."""


class InterruptibleThread:
    """Thread for blocking calls that receive no exceptions; after :meth:`interrupt`, it ends with its last task."""

    def __init__(self):
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._started = self._is_interrupted = False

    def run(self, task: Callable):
        """Runs a task in the deputy thread, and returns its result or raises its exception.

        Raises:
            CallInterrupted: :meth:`interrupt` was called; the task continues, and its result is lost.
        """
        answers: list[tuple] = []
        with self._changed:
            if self._is_interrupted:
                raise CallInterrupted
            if not self._started:
                self._started = True
                threading.Thread(target=self._serve, name="deputy", daemon=True).start()
            self._tasks.put((task, answers))
            self._changed.wait_for(lambda: answers or self._is_interrupted)
            if not answers:
                raise CallInterrupted
            answer, error = answers.pop()
        if error is not None:
            raise error
        return answer

    def interrupt(self) -> None:
        """Interrupts the caller of :meth:`run`; any thread may call it."""
        with self._changed:
            self._is_interrupted = True
            self._tasks.put(None)
            self._changed.notify_all()

    def _serve(self) -> None:
        while (item := self._tasks.get()) is not None:
            task, answers = item
            try:
                answer = (task(), None)
            except BaseException as error:  # re-raised by do()
                answer = (None, error)
            with self._changed:
                answers.append(answer)
                self._changed.notify_all()
            del item, task, answers, answer  # not referenced until the next task


_ATTACH_FILTER = 26  # SO_ATTACH_FILTER of asm-generic/socket.h
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # linux/filter.h: BPF_RET | BPF_K, 0 bytes of the packet


def cut_unauthenticated_connections(
    store: Any, key: str, inodes: Iterable[int], wait_for_all: Callable[[], None]
) -> int:
    """Cuts connections whose other end is no worker of the job.  All workers of the rendezvous call it.

    Args:
        store: ``torch.distributed.Store`` of the rendezvous, not accessible to unauthenticated peers.
        key: prefix of this rendezvous.
        inodes: sockets created for it, from :func:`~moc.runtime.abort.open_sockets`.
        wait_for_all: function that returns when all workers have called it.

    Returns:
        The number of connections with workers.
    """
    ends: dict[int, tuple[str, str]] = {}
    for inode, sock in duplicate_sockets(inodes):
        with sock:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                _reject_connections(sock)
                continue
            try:
                local_end, remote_end = (
                    f"{host}:{port}" for host, port, *_ in (sock.getsockname(), sock.getpeername())
                )
            except OSError:  # already disconnected
                continue
            ends[inode] = local_end, remote_end
    store.multi_set([f"{key}/{here}-{there}" for here, there in ends.values()], [""] * len(ends))
    wait_for_all()
    mirrored = {inode: f"{key}/{there}-{here}" for inode, (here, there) in ends.items()}
    if not mirrored or store.check(list(mirrored.values())):
        return len(mirrored)
    unauthenticated = [inode for inode, mirror in mirrored.items() if not store.check([mirror])]
    shut_down_sockets(unauthenticated)
    return len(mirrored) - len(unauthenticated)


def _reject_connections(listener: socket.socket) -> None:
    """Lets the kernel drop packets to a listening socket.  It stays open, because gloo ends the process if it fails."""
    program = ctypes.create_string_buffer(_DROP_ALL)
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


CONNECT_TIMEOUT = timedelta(seconds=10)
"""Timeout for connecting one group once all of its ranks have arrived; until then the group's own timeout applies."""
DROP_TIMEOUT_S = 0.05  # seconds for freeing connections that are not stuck
ABORT_TIMEOUT_S = 60.0  # seconds; ncclCommAbort takes much less than 1 s if CUDA still works


class _GroupSpec(Protocol):
    """Group that a generation connects: :class:`moc.runtime.process_group.Group`."""

    ranks: list[int]
    backend: str
    timeout: timedelta
    options: Any
    collectives_only: bool
    unbatched: bool

    @property
    def group_name(self) -> Any: ...

    def rank(self) -> int: ...

    def size(self) -> int: ...


class _NeighbourPair:
    """Two neighbours of a group with a separate communicator."""

    collectives_only = unbatched = False

    def __init__(self, group: _GroupSpec, peer: int):
        low, high = sorted((group.rank(), peer))
        self.ranks, self.group_name = [group.ranks[low], group.ranks[high]], f"{group.group_name}-{low}-{high}"
        self.backend, self.timeout, self.options = group.backend, group.timeout, None
        self._rank = int(group.rank() == high)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2


def neighbours(rank: int, size: int) -> list[int]:
    """Returns the neighbours of a rank in a ring of three ranks or more, in the order of connecting.

    Pairs that begin at even ranks connect first.  The order is the same on all ranks, so there is no circular wait, and
    a rank waits for two pairs at most.
    """
    previous_rank, next_rank = (rank - 1) % size, (rank + 1) % size
    return [
        peer for _, _, peer in sorted([(previous_rank % 2, previous_rank, previous_rank), (rank % 2, rank, next_rank)])
    ]


class GroupConnection:
    """Connection of a group in one generation; executes the group's operations.

    Attributes:
        store: rendezvous store of its ranks, with the group's prefix.
        backend: ``ProcessGroupGloo`` or ``ProcessGroupNCCL``.
        inner: a plain ``ProcessGroup`` around the backend, so that operations take their usual path through torch's
            dispatcher; None once dropped.
        connect_later: connects the backend at its first use; None if it is connected.
        batch_device: device of an open batch of operations of this thread; None without one.
        pairs: by rank of a neighbour, the separate connection, if any, for transfers with it outside of batches.
    """

    def __init__(self, generation: Generation, group: _GroupSpec, store: Store, backend: Backend):
        self.generation, self.group = generation, group
        self.connect_later: Callable[[], None] | None = None
        self.batch_device: torch.device | None = None
        self.pairs: dict[int, GroupConnection] = {}
        self.store: Store | None = store
        self.backend: Backend | None = backend
        self.inner: dist.ProcessGroup | None = dist.ProcessGroup(store, group.rank(), group.size())
        kind = dist.ProcessGroup.BackendType.NCCL if group.backend == "nccl" else dist.ProcessGroup.BackendType.GLOO
        self.inner._set_default_backend(kind)
        for device in device_types(group.backend):
            self.inner._register_backend(torch.device(device), kind, backend)
        self.inner._set_group_name(group.group_name)

    def end_batch(self) -> None:
        """Ends a batch that an exception has interrupted; called by the thread that began it.

        NCCL counts open batches by thread.  While a batch is open, NCCL launches no operations of its thread.
        """
        if self.batch_device is not None and self.inner is not None:
            with contextlib.suppress(RuntimeError):  # errors of its operations, whose results are unused
                self.inner._end_coalescing(self.batch_device)
        self.batch_device = None

    def drop(self) -> None:
        """Frees threads and sockets.  The backend is freed last, because it joins its threads without the GIL."""
        for pair in self.pairs.values():
            pair.drop()
        self.inner = None
        self.backend = None
        self.store = None


class Generation:
    """One generation of this process.

    Attributes:
        number: number of the generation.
        is_over: whether it was aborted; never reset.
        deputy: thread for uninterruptible calls of gloo.
    """

    def __init__(self, number: int, store: Store | Callable[[], Store], device: torch.device):
        self.number = number
        self.is_over = False
        self.deputy = InterruptibleThread()
        self._device = device
        self._store_source: Store | Callable[[], Store] | None = store
        self._store: PrefixStore | None = None
        self._open_store: Any = None  # torch keeps only the C++ part of a store that is implemented in Python
        self._sockets: set[int] = set()  # sockets of gloo
        self._nccl_backends: list[Backend] = []
        self._connections: list[GroupConnection] = []
        self._abort_lock, self._is_aborted = threading.Lock(), False

    def connect(
        self, groups: Sequence[_GroupSpec], key: str, ranks: list[int], timeout: timedelta
    ) -> list[GroupConnection]:
        """Waits until all ranks have arrived, then connects the groups one after the other.

        Must run in the deputy, because exceptions cannot interrupt its blocking calls.

        Args:
            groups: groups of this rank, in order of creation.
            key: key of this set of groups, equal on all ranks and used once per generation.
            ranks: ranks that call this method.
            timeout: timeout for their arrival.

        Raises:
            RuntimeError: a peer or the store could not be reached, or this generation is over.
        """
        self._wait_for_ranks(key, ranks, timeout)
        connections: dict[_GroupSpec, GroupConnection] = {}
        sockets_before = open_sockets()
        devices = _gloo_devices() if any(group.backend == "gloo" for group in groups) else []
        for group in (group for group in groups if group.backend == "gloo"):
            connections[group] = self._connect_backend(group, _build_gloo, devices)
        new_sockets = open_sockets() - sockets_before
        self._sockets |= new_sockets
        self._cut_unauthenticated(
            key, ranks, timeout, new_sockets, sum(group.size() - 1 for group in groups if group.backend == "gloo")
        )
        for group in (group for group in groups if group.backend == "nccl"):
            connections[group] = self._connect_nccl(group)
            if group.unbatched and group.size() > 2:
                peers = neighbours(group.rank(), group.size())
                connections[group].pairs = {peer: self._connect_nccl(_NeighbourPair(group, peer)) for peer in peers}
        return [connections[group] for group in groups]

    def _wait_for_ranks(self, key: str, ranks: list[int], timeout: timedelta) -> None:
        """Waits until all ranks have arrived; raises RuntimeError if this generation is over."""
        if self._store is None:
            source: Any = self._store_source  # torch's stubs lack clone()
            self._open_store = source() if callable(source) else source.clone()
            self._store = PrefixStore(f"generation{self.number}", self._open_store)
        self._check()
        if self._store.add(f"{key}/arrived", 1) == len(ranks):  # a value of each rank would be read by all ranks
            self._store.set(f"{key}/complete", "")
        self._store.wait([f"{key}/complete"], timeout)
        self._check()

    def _cut_unauthenticated(
        self, key: str, ranks: list[int], timeout: timedelta, sockets: set[int], pairs: int
    ) -> None:
        """Shuts down unauthenticated connections; raises RuntimeError if any was counted as a worker's connection."""
        assert self._store is not None  # set by _arrive()
        known = cut_unauthenticated_connections(
            self._store, f"{key}/ends", sockets, lambda: self._wait_for_ranks(f"{key}/connected", ranks, timeout)
        )
        if known != pairs:
            raise RuntimeError(
                f"gloo has connected this worker {pairs} times, and {known} of the connections lead to workers of this "
                "job: strangers are in the network, or something in it changes addresses"
            )

    def _check(self) -> None:
        if self.is_over:
            raise RuntimeError(f"generation {self.number} ended while it began")

    def _connect_backend(self, group: _GroupSpec, build, *arguments) -> GroupConnection:
        self._check()
        # a group of one rank needs no rendezvous
        assert self._store is not None  # set by _arrive()
        store = PrefixStore(group.group_name, self._store) if group.size() > 1 else HashStore()
        return GroupConnection(self, group, store, build(group, store, *arguments))

    def _connect_nccl(self, group: _GroupSpec) -> GroupConnection:
        """Connects in the deputy, which can be abandoned, rather than in the compute thread's first operation.

        Most groups of one rank, and many groups for collectives only, are never used.  Each costs memory and 0.1 s, so
        they connect at their first use.
        """
        connection = self._connect_backend(group, _build_nccl, self._device, self._nccl_backends)
        backend: Any = connection.backend

        def connect() -> None:
            backend.eager_connect_single_device(self._device)

        if connection.group.size() > 1 and not connection.group.collectives_only:
            connect()
        else:
            connection.connect_later = connect
        return connection

    def add_connections(self, connections: list[GroupConnection]) -> None:
        """Takes ownership of connections, which are dropped with this generation."""
        self._connections += connections

    def abort(self) -> None:
        """Marks the generation as over and wakes all threads that wait for peers; thread-safe and idempotent."""
        self.is_over = True
        self.deputy.interrupt()
        if hasattr(self._open_store, "close"):
            self._open_store.close()  # wakes the deputy if it waits for the store
        with self._abort_lock:
            if self._is_aborted:
                return
            self._is_aborted = True
            # excludes connecting sockets: gloo closes them twice on failure and may close a reused descriptor
            shut_down_sockets(self._sockets)
            abort_nccl(self._nccl_backends, ABORT_TIMEOUT_S)

    def drop(self) -> None:
        """Ends the generation and frees its resources; no other thread may be using it.

        A backend whose thread is stuck is freed by a separate thread once its timeout has expired.
        """
        self.abort()
        dropping: queue.SimpleQueue = queue.SimpleQueue()
        for connection in self._connections:
            dropping.put(connection)
        self._connections, self._nccl_backends, self._store, self._store_source = [], [], None, None
        while not dropping.empty():
            thread = threading.Thread(target=_drop_all, args=(dropping,), name="drop", daemon=True)
            thread.start()
            thread.join(DROP_TIMEOUT_S)


def _drop_all(connections: queue.SimpleQueue) -> None:
    while True:
        try:
            connections.get_nowait().drop()
        except queue.Empty:
            return


def device_types(backend: str) -> list[str]:
    """Returns the device types that a backend supports, such as ``cpu`` or ``cuda``."""
    return list(backend_config(backend).get_device_backend_map())


def backend_config(backend: str) -> BackendConfig:
    """Returns torch's mapping of device types to backends."""
    return BackendConfig(dist.Backend(backend))  # pyright: ignore[reportArgumentType]  # torch declares a str


def _gloo_devices() -> list:
    """Returns gloo's devices, shared by all groups of a generation: each has a thread and a listening socket.

    The interfaces are chosen in the same way as in torch.
    """
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    # connects eagerly: an abort needs all sockets, so they must exist before the first collective
    if not interfaces:
        return [dist.ProcessGroupGloo.create_default_device(lazy_init=False)]
    return [dist.ProcessGroupGloo.create_device(interface=name, lazy_init=False) for name in interfaces]


def _build_gloo(group: _GroupSpec, store: Store, devices: list) -> Backend:
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack its options
    options = gloo._Options()
    options._devices = devices
    options._timeout = min(group.timeout, CONNECT_TIMEOUT)
    options.global_ranks_in_group, options.group_name = group.ranks, group.group_name
    backend = gloo(store, group.rank(), group.size(), options)
    backend._set_default_timeout(group.timeout)
    _start_sequence_numbers(backend)
    return backend


def _build_nccl(group: _GroupSpec, store: Store, device: torch.device, made: list) -> Backend:
    torch.cuda.set_device(device)  # per-thread state
    nccl: Any = dist.ProcessGroupNCCL  # absent without CUDA
    options = group.options or nccl.Options()
    options._timeout = group.timeout
    options.global_ranks_in_group, options.group_name = group.ranks, group.group_name
    backend = nccl(store, group.rank(), group.size(), options)
    made.append(backend)  # end() can abort it from here on
    _start_sequence_numbers(backend)
    return backend


def _start_sequence_numbers(backend: Backend) -> None:
    """Starts the sequence numbers of a group; torch 2.15 and later does this itself and warns about the call."""
    if TorchVersion(torch.__version__) < "2.15":
        backend._set_sequence_number_for_group()
