"""Groups whose operations run later, in a thread of each group, by gloo; and their place in :mod:`moc.runtime`."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import random
import resource
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BackendConfig, PrefixStore

from moc.runtime import generation
from moc.runtime.abort import open_sockets, shut_down_sockets
from moc.runtime.process_group import _OPERATIONS, Group
from tests.lying.device import DEVICE, Lies, StreamMark, compute_on_stream, fill_with_garbage

DUMP = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
PATIENCE = timedelta(minutes=10)
MOST_BYTES = 8 << 30  # garbage may be a size
_RELEASE_S = 0.2  # for a thread whose sockets are cut
_RECEIVED = 1 << 20  # added to the tag of a message
_GIVES_NOTHING = ("send", "barrier")

_lies = Lies()
_chance = random.Random()
_depth = threading.local()  # of open batches, as NCCL counts them


class LyingWork(dist.Work):
    """An operation that is enqueued."""

    def __init__(self, names: list[str], calls: list[tuple], ahead: list, rank: int = 0):
        super().__init__()
        self.names, self.calls, self.ahead, self.done = names, calls, ahead, threading.Event()
        self.begun: list[dist.Work] = []
        self._rank = rank

    @property
    def outputs(self) -> list[torch.Tensor]:
        """Memory to fill, without the part that it sends from."""
        return [
            tensor
            for name, (args, _) in zip(self.names, self.calls, strict=True)
            if name not in _GIVES_NOTHING and not (name == "broadcast" and args[1].rootRank == self._rank)
            for tensor in (_others_parts(*args[:2], self._rank) if name == "_allgather_base" else _tensors(args[0]))
        ]

    def wait(self, timeout=None) -> bool:
        """Lets the stream wait; after a barrier, the thread waits for the stream."""
        DEVICE.wait_for(self)
        if "barrier" in self.names:
            DEVICE.drain()
        return True

    synchronize = wait

    def _source_rank(self) -> int:
        """Sender of the received message."""
        self.done.wait()
        return self.begun[0]._source_rank()

    def is_completed(self) -> bool:
        """Whether it has been executed, or was aborted."""
        return self.done.is_set()


def _others_parts(whole: torch.Tensor, mine: torch.Tensor, rank: int) -> list[torch.Tensor]:
    """The parts of an all-gather's output that come from other ranks; all of it if this rank's part is elsewhere."""
    parts = list(whole.view(-1).split(mine.numel())) if mine.numel() else []
    in_place = bool(parts) and parts[rank].data_ptr() == mine.data_ptr()
    return [part for number, part in enumerate(parts) if not (in_place and number == rank)]


def _tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, (list, tuple)) else []


class LyingBackend:
    """A group in one generation, both as its backend and as what operations are forwarded to.

    Args:
        group: as :class:`moc.runtime.generation.Generation` connects it.
        store: for the rendezvous of its ranks.
    """

    supports_coalescing = True

    def __init__(self, group, store):
        self._group, self._store = group, store
        self._gloo: dist.ProcessGroup | None = None
        self._sockets: set[int] = set()
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._enqueuing, self._watchdog_acts = threading.Lock(), False
        self._undone: list[LyingWork] = []
        self._batch: list[tuple[str, tuple]] = []
        self._aborted = False
        self._thread: threading.Thread | None = None

    # as ProcessGroupNCCL

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Connects; never returns if a peer is lost meanwhile."""
        if self._group.size() > 1:
            self._refuse_shared_devices()
        before = open_sockets()
        try:
            backend = generation._build_gloo(self._group, PrefixStore("lying", self._store), generation._gloo_devices())
        except RuntimeError:
            threading.Event().wait()
        self._sockets = open_sockets() - before
        inner = dist.ProcessGroup(self._store, self._group.rank(), self._group.size())
        inner._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        inner._set_group_name(f"{self._group.group_name}-lying")
        self._gloo = inner

    def _refuse_shared_devices(self) -> None:
        mine = f"{os.environ.get('GROUP_RANK', 0)}/{os.environ.get('LOCAL_RANK', os.environ['RANK'])}"
        self._store.set(f"device/{self._group.rank()}", mine)
        others = {rank: self._store.get(f"device/{rank}").decode() for rank in range(self._group.size())}
        same = [rank for rank, device in others.items() if device == mine]
        if len(same) > 1:
            raise RuntimeError(f"Duplicate GPU detected: ranks {same} are both on {mine}")

    def abort(self) -> None:
        """Ends what is under way: it completes, with garbage."""
        assert not self._aborted, "two aborts of one group deadlock"
        self._aborted = True
        fails = _breaks()
        shut_down_sockets(self._sockets)
        deadline = time.monotonic() + _RELEASE_S
        for work in [*self._undone]:
            work.done.wait(max(0.0, deadline - time.monotonic()))
        self._release()
        self._queue.put(None)
        if fails == "fails":
            raise RuntimeError("NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)")
        if fails:
            DEVICE.broken = "CUDA error: an illegal memory access was encountered"

    def _release(self) -> None:
        for work in [*self._undone]:
            if not work.done.is_set():
                fill_with_garbage(work.outputs, _chance)
                work.done.set()
        self._undone.clear()

    # operations

    def _get_backend(self, device: torch.device) -> LyingBackend:
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        _depth.value = getattr(_depth, "value", 0) + 1

    def _end_coalescing(self, device: torch.device) -> LyingWork:
        _depth.value -= 1
        batch, self._batch = self._batch, []
        if not batch:
            work = LyingWork([], [], [])
            work.done.set()
            return work
        return self._enqueue(batch)

    def __getattr__(self, name: str):
        if name not in _OPERATIONS:
            raise AttributeError(name)

        def operate(*args, **kwargs) -> LyingWork:
            call = name, (args, kwargs)
            if getattr(_depth, "value", 0):
                self._batch.append(call)
                unlaunched = LyingWork([], [], [])
                unlaunched.done.set()  # nothing is on the stream yet
                return unlaunched
            return self._enqueue([call])

        return operate

    def _enqueue(self, calls: list[tuple[str, tuple]]) -> LyingWork:
        while not self._enqueuing.acquire(timeout=0.01):
            pass
        try:
            if DEVICE.broken:
                raise RuntimeError(DEVICE.broken)
            if self._aborted:
                raise RuntimeError("NCCL communicator was aborted on rank")
            work = LyingWork([name for name, _ in calls], [call for _, call in calls], DEVICE.ahead, self._group.rank())
            self._undone.append(work)
            self._queue.put(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._execute_all, name="lying", daemon=True)
                self._thread.start()
            return work
        finally:
            self._enqueuing.release()

    # the device's side

    def _execute_all(self) -> None:
        while (work := self._queue.get()) is not None:
            for earlier in work.ahead:
                earlier.done.wait()
            if not self._aborted:
                self._execute(work)
            if self._aborted:
                break
        self._release()

    def _execute(self, work: LyingWork) -> None:
        assert self._gloo is not None  # the product connects before it operates
        try:
            for name, (args, kwargs) in zip(work.names, work.calls, strict=True):
                work.begun.append(getattr(self._gloo, name)(*args, **kwargs))
            for started in (lambda: work.begun, lambda: [*self._acknowledge(work)]):
                for each in started():
                    each.wait(PATIENCE)
        except RuntimeError:
            self._peer_is_gone(work)
            return
        if not self._aborted:
            with contextlib.suppress(ValueError):  # it is being aborted
                self._undone.remove(work)
            work.done.set()

    def _acknowledge(self, work: LyingWork) -> Iterator[dist.Work]:
        """Messages by which a send ends when it is received, as that of a large message does."""
        back = {"send": "recv", "recv": "send"}
        for name, (args, _) in zip(work.names, work.calls, strict=True):
            if name in back:
                yield getattr(self._gloo, back[name])([torch.zeros(1)], args[1], args[2] + _RECEIVED)

    def _peer_is_gone(self, work: LyingWork) -> None:
        """Kernels wait for ever for a peer that has died; for one that has aborted, they may complete with garbage."""
        if not self._watchdog_acts:
            self._watchdog_acts = True
            threading.Thread(target=self._watchdog, name="watchdog", daemon=True).start()
        if _chance.random() < _lies.completes and not self._aborted:
            fill_with_garbage(work.outputs, _chance)
            work.done.set()
            return
        while not self._aborted:
            time.sleep(0.002)

    def _watchdog(self) -> None:
        with self._enqueuing:
            time.sleep(4 * int(os.environ.get(DUMP, "15000")) / 1000)


def _breaks() -> str:
    """Whether and how this abort breaks the device."""
    if DEVICE.broken or int(os.environ["RANK"]) in _lies.spares or _chance.random() >= _lies.breaks:
        return ""
    return _chance.choice(_lies.how)


class Connection(generation.GroupConnection):
    """As its base class, also for a backend that is not torch's."""

    def __init__(self, its_generation, group, store, backend):
        if not isinstance(backend, LyingBackend):
            super().__init__(its_generation, group, store, backend)
            return
        self.generation, self.group, self.store = its_generation, group, store
        self.connect_later = self.batch_device = None
        self.pairs = {}
        self.backend = self.inner = backend


def install(lies: Lies | None = None) -> None:
    """Lets groups of the backend ``nccl`` lie in this process, whose main thread computes on their device."""
    from moc import stream
    from moc.runtime import device, groups

    global _lies
    _lies = lies or Lies.from_environment()
    _chance.seed(f"{_lies.seed} {os.environ.get('RANK')} {os.environ.get('MOC_WORKER')}")
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    generation.GroupConnection = Connection
    generation._build_nccl = _build
    generation.abort_nccl = _counting(generation.abort_nccl)
    for module in (generation, groups):
        module.backend_config = _backend_config
    torch.cuda.nccl.version = lambda: (2, 28, 9)
    Group.bound_device_id = property(lambda self: None)
    device.query, device.synchronize = _raise_if_broken, _synchronize
    stream.marker_of = lambda device: StreamMark
    _let_copies_follow_stream()
    _exchange_in_host_memory()
    compute_on_stream()


def _exchange_in_host_memory() -> None:
    """Messages in host memory wait for no device, in any module."""
    from moc.runtime import collectives

    for name in ("gather", "broadcast_from_rank0"):
        function = getattr(collectives, name)

        @functools.wraps(function)
        def aside(*args, function=function, **kwargs):
            with DEVICE.aside():
                return function(*args, **kwargs)

        for module in [*sys.modules.values()]:
            if vars(module).get(name) is function:
                setattr(module, name, aside)


def _let_copies_follow_stream() -> None:
    """Snapshots are copied in another thread, which on a GPU waits for the stream by an event."""
    from moc.session.session import Session

    take = Session.take

    def taking(self):
        DEVICE.drain()
        return take(self)

    Session.take = taking


def _counting(abort):
    """Notes each abort in the file ``LYING_LOG``: rank, and how many operations were under way."""

    def counted(backends: list, patience: float) -> None:
        under_way = sum(len(backend._undone) for backend in backends)
        if backends and (path := os.environ.get("LYING_LOG")):
            with open(path, "a") as file:
                file.write(f"{os.environ['RANK']} {under_way}\n")
        abort(backends, patience)

    return counted


def _build(group, store, device, made: list) -> LyingBackend:
    backend = LyingBackend(group, store)
    made.append(backend)
    return backend


def _backend_config(backend: str) -> BackendConfig:
    return BackendConfig(dist.Backend("cpu:nccl" if backend == "nccl" else backend))


def _synchronize(device: torch.device) -> None:
    for work in DEVICE.ahead:
        work.done.wait()
    _raise_if_broken(device)


def _raise_if_broken(device: torch.device) -> None:
    if DEVICE.broken:
        raise RuntimeError(DEVICE.broken)
