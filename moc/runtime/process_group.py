"""Implements a process group that outlives its connections and is an ordinary group for torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from moc.runtime.generation import CallInterrupted, Generation, GroupConnection, device_types
from moc.runtime.progress import PROGRESS

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend  # dist.Backend is a string

POLL_INTERVAL = timedelta(milliseconds=50)
"""Interval of generation checks during a wait for a gloo collective, unless gloo wakes it."""


class Aborted(RuntimeError):
    """Error of an operation whose generation is over: unwind, report, and wait for the next generation."""


class PeerFailure(RuntimeError):
    """Communication failure in a generation that was not aborted: a peer may be lost."""


class FailureDeferral:
    """Deferral of communication failures in code that cannot catch them, such as the body of a user's loop.

    Inside of :meth:`active`, an operation that fails sets its outputs to zero and counts as complete.  So a model's
    forward and backward end in good order.  :meth:`raise_deferred` then raises the first failure.

    Attributes:
        failure: first failure since the last :meth:`raise_deferred`; None without one.
    """

    def __init__(self):
        self.is_active = False
        self.failure: Exception | None = None

    def set_active(self, is_active: bool) -> None:
        """Begins or ends the deferral."""
        self.is_active = is_active

    def raise_deferred(self) -> None:
        """Raises the first deferred failure, if there is one."""
        failure, self.failure = self.failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # otherwise the error's traceback refers to the error

    def defer(self, failure: RuntimeError, outputs: object) -> None:
        """Records a failure of an active deferral, and sets the outputs to zero."""
        if self.failure is None:
            self.failure = failure
        with torch.no_grad():
            for tensor in _tensors_in(outputs):
                tensor.zero_()


DEFERRAL = FailureDeferral()
"""The deferral of this process."""


def _tensors_in(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors_in(item)] if isinstance(value, list | tuple) else []


class DeferredFailure(dist.Work):
    """Handle of an operation whose failure is deferred; it is complete."""

    def __init__(self, outputs: object):
        super().__init__()
        self._outputs = _tensors_in(outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns True without waiting."""
        return True

    def get_future(self) -> torch.futures.Future:
        """Returns a complete future with the outputs."""
        return _completed(self._outputs)

    def is_completed(self) -> bool:
        """Returns True."""
        return True

    def is_success(self) -> bool:
        """Returns True: the failure is raised later."""
        return True

    def synchronize(self) -> None:
        """Does not wait."""


def _completed(outputs: list[torch.Tensor]) -> torch.futures.Future:
    future = torch.futures.Future()
    future.set_result(outputs)
    return future


class Group(dist.ProcessGroup):
    """Process group that is reconnected in each generation; created by :meth:`moc.runtime.groups.Groups.new_group`.

    Operations of ``dist.ProcessGroup`` are forwarded to the current connection.  They, and ``wait()`` of the handles
    that they return, raise :class:`Aborted` if the generation is over, and :class:`PeerFailure` for other failures.

    Its members may change between two generations (:meth:`moc.runtime.groups.Groups.change_rank`).  Code that keeps the
    group must then read its rank and size again.

    A negative rank is a *vacant position* that no process has.  A group with one has a rank and size, but connects no
    process.  If all other positions are vacant, a sum or broadcast over the group changes nothing.

    Attributes:
        ranks: global ranks of its members, by group rank.
        backend: ``gloo`` or ``nccl``.
        timeout: timeout of an operation, as interpreted by the backend.
        options: ``ProcessGroupNCCL.Options`` or None.
        collectives_only: whether all members call its operations in the same order, so that the first one connects it.
        unbatched: whether members transfer to their neighbours outside of batches.  NCCL executes the transfers of one
            communicator in the order of the calls.  So each pair of neighbours has a separate communicator, as with
            torch's groups that connect on demand.
        connection: connection of the current generation; None before the first.
        has_vacant_positions: whether some positions are vacant.
    """

    def __init__(
        self,
        name: str,
        ranks: list[int],
        rank: int,
        backend: str,
        timeout: timedelta,
        options,
        description,
        collectives_only: bool = False,
        unbatched: bool = False,
    ):
        super().__init__(ranks.index(rank), len(ranks))  # pyright: ignore[reportCallIssue]  # stubs want a store, too
        self.backend, self.timeout, self.options = backend, timeout, options
        self.collectives_only, self.unbatched = collectives_only, unbatched
        self._description = description or "undefined"
        self.set_members(name, ranks, rank)

    def rank(self) -> int:
        """Returns the rank of this process in the group."""
        return self._rank

    def size(self) -> int:
        """Returns the number of positions in the group."""
        return len(self.ranks)

    def set_members(self, name: str, ranks: list[int], rank: int) -> None:
        """Sets the members from the next generation on; ``rank`` is the global rank of this process."""
        self.connection: GroupConnection | None = None
        self._name, self.ranks, self._rank = name, ranks, ranks.index(rank)
        self.has_vacant_positions = min(ranks) < 0
        self._is_only_member = self.has_vacant_positions and sum(member >= 0 for member in ranks) == 1

    @property
    def group_name(self) -> str:
        """Name of the group, equal on all of its ranks and constant over generations."""
        return self._name

    @property
    def group_desc(self) -> str:
        """Description given by the group's creator."""
        return self._description

    @property
    def bound_device_id(self) -> torch.device | None:
        """Device of a barrier; None on the CPU."""
        return torch.device("cuda", torch.cuda.current_device()) if self.backend == "nccl" else None

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in device_types(self.backend)]

    def _get_backend(self, device: torch.device) -> Backend:
        return self.connected_group()._get_backend(device)

    def connected_group(self) -> dist.ProcessGroup:
        """Returns the connected group that executes this group's operations now; callers must not keep it.

        Raises:
            Aborted: the generation is over.
            PeerFailure: connecting at the first use failed.
            RuntimeError: no generation has begun yet, or a position of the group is vacant.
        """
        connection = self.connection
        if self.has_vacant_positions:
            raise RuntimeError(f"{self} has vacant positions, so it is not connected: communicate in another group")
        if connection is None:
            raise RuntimeError(
                f"{self} is not connected yet: this worker joins others that already train. Fix: communicate only "
                "after Session.resume(); with moc.torch, wrap the model by protect(wrap=...), and call "
                "parallelize_module with src_data_rank=None"
            )
        if connection.generation.is_over:
            raise Aborted(aborted_message(self, connection.generation))
        assert connection.inner is not None  # dropped only after the generation is over
        if connection.connect_later is not None:
            self._connect_deferred(connection, connection.connect_later)
        return connection.inner

    def _route(self, name: str, args: tuple) -> tuple[dist.ProcessGroup, tuple]:
        """Returns the connected group that executes an operation, and the arguments of the operation for it."""
        inner, connection = self.connected_group(), self.connection
        assert connection is not None  # otherwise live() raises
        if name not in _PAIR_OPERATIONS or connection.batch_device is not None or args[1] not in connection.pairs:
            return inner, args
        pair = connection.pairs[args[1]].inner
        assert pair is not None  # dropped only with its generation
        return pair, (args[0], int(args[1] > self._rank), *args[2:])

    def _connect_deferred(self, connection: GroupConnection, connect: Callable[[], None]) -> None:
        try:
            with PROGRESS.waiting():
                connection.generation.deputy.run(connect)
        except (CallInterrupted, RuntimeError) as error:
            if connection.generation.is_over:
                raise Aborted(aborted_message(self, connection.generation)) from error
            raise PeerFailure(str(error)) from error
        connection.connect_later = None

    def check_transfers(self) -> None:
        """Raises RuntimeError if the group allows only collectives, since a transfer would not connect it."""
        if self.collectives_only and self.size() > 1:
            raise RuntimeError(f"{self} is used for collectives only: transfer in another group")

    def abort(self) -> None:
        """Raises RuntimeError: :meth:`moc.runtime.groups.Groups.abort` aborts all groups of a generation together."""
        raise RuntimeError(f"{self} cannot be aborted separately: call Groups.abort()")

    def shutdown(self) -> None:
        """Releases the connection; called by ``dist.destroy_process_group``."""
        self.connection = None

    def __repr__(self):
        return f"process group {self._name} ({self._description}) of ranks {self.ranks}"


class OperationHandle(dist.Work):
    """Handle of an operation in progress, whose ``wait()`` ends with the generation.

    gloo cannot poll some operations (``needs_deputy``) with a short timeout.  A timed-out wait for a send or receive
    closes the connection.  A wait for a reduce-scatter lasts for the group's timeout.  The deputy waits for these
    operations.
    """

    def __init__(self, work: dist.Work, group: Group, generation: Generation, needs_deputy: bool, outputs: object):
        super().__init__()
        self._work, self._group, self._generation, self._needs_deputy = work, group, generation, needs_deputy
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits in the same way as ``dist.Work.wait``.

        Raises:
            Aborted: the generation is over; the transfer may or may not be complete.
            PeerFailure: the operation failed for another reason.
        """
        try:
            return self._wait_or_raise(timeout)
        except (Aborted, PeerFailure) as error:
            if not DEFERRAL.is_active:
                raise  # without another reference to the error, whose traceback keeps the connection alive
            DEFERRAL.defer(error, self._outputs)
            return True

    def get_future(self) -> torch.futures.Future:
        """Returns the operation's future; the future of a failed operation is complete if failures are deferred."""
        future = self._work.get_future()
        # NCCL's operations do not fail on the host
        return future.then(self._or_deferred) if DEFERRAL.is_active and self._group.backend == "gloo" else future

    def _or_deferred(self, future: torch.futures.Future) -> object:
        try:
            return future.value()
        except RuntimeError as error:
            if not DEFERRAL.is_active:
                raise
            over = self._generation.is_over
            failure = Aborted(aborted_message(self._group, self._generation)) if over else PeerFailure(str(error))
            DEFERRAL.defer(failure, self._outputs)
            return _tensors_in(self._outputs)

    def _wait_or_raise(self, timeout: timedelta | None) -> bool:
        try:
            with PROGRESS.waiting(self._group.backend == "nccl"):
                done = self._wait(timeout)
        except (CallInterrupted, RuntimeError) as error:
            if self._generation.is_over:
                raise Aborted(aborted_message(self._group, self._generation)) from error
            raise PeerFailure(str(error)) from error
        # on return gloo's work is complete, but NCCL's may have been aborted
        if self._generation.is_over and self._group.backend == "nccl":
            raise Aborted(aborted_message(self._group, self._generation))
        return done

    def _wait(self, timeout: timedelta | None) -> bool:
        work = self._work
        if self._group.backend == "nccl":
            return work.wait() if timeout is None else work.wait(timeout)
        if self._needs_deputy:
            # gloo's default is its connection timeout
            limit = timeout or self._group.timeout
            return self._generation.deputy.run(lambda: work.wait(limit))
        if timeout is not None:
            return work.wait(timeout)
        while True:  # until gloo reports completion, failure or its timeout
            try:
                return work.wait(POLL_INTERVAL)
            except RuntimeError:
                if work.is_completed():
                    return work.wait()
                if self._generation.is_over:
                    raise


def aborted_message(group: Group, generation: Generation) -> str:
    """Returns the message of :class:`Aborted`."""
    return f"generation {generation.number} of {group} is over: unwind and begin the next one"


def _make_operation(name: str):
    deaf = name in ("recv", "recv_anysource", "send") or "reduce_scatter" in name

    def operate(self, *args, **kwargs):
        if self._is_only_member and name in _NO_EFFECT_ALONE:
            return None
        outputs = args[0] if args and name not in _WITHOUT_OUTPUTS else None
        try:
            if DEFERRAL.is_active and DEFERRAL.failure is not None:
                raise PeerFailure(f"{self} is not used after a failure")  # other workers may not use it, either
            return operate_or_raise(self, *args, **kwargs)
        except (Aborted, PeerFailure) as error:
            if not DEFERRAL.is_active:
                raise
            DEFERRAL.defer(error, outputs)
            return DeferredFailure(outputs)

    def operate_or_raise(self, *args, **kwargs):
        if name in _TRANSFERS:
            self.check_transfers()
        inner, args = self._route(name, args)
        operation, connection = getattr(inner, name), self.connection
        generation = connection.generation
        try:
            with PROGRESS.waiting(self.backend == "nccl"):
                result = operation(*args, **kwargs)
            if name in _BATCHES:  # Groups.begin() ends an interrupted batch
                connection.batch_device = args[0] if name == "_start_coalescing" else None
        except RuntimeError as error:
            if generation.is_over:
                raise Aborted(aborted_message(self, generation)) from error
            raise PeerFailure(str(error)) from error
        finally:
            del operation, inner  # a kept traceback must not keep the connection alive
        if not isinstance(result, dist.Work):
            return result
        outputs = args[0] if DEFERRAL.is_active and args and name not in _WITHOUT_OUTPUTS else None
        return OperationHandle(result, self, generation, deaf, outputs)

    operate.__name__, operate.__doc__ = name, f"Same as ``dist.ProcessGroup.{name}``."
    return operate


def _make_query(name: str):
    def query(self, *args, **kwargs):
        return getattr(self._work, name)(*args, **kwargs)

    query.__name__, query.__doc__ = name, f"Same as ``dist.Work.{name}``."
    return query


_NO_EFFECT_ALONE = ("allreduce", "broadcast")
_TRANSFERS = ("send", "recv", "recv_anysource")
_PAIR_OPERATIONS = ("send", "recv")
_WITHOUT_OUTPUTS = ("send", "barrier", "monitored_barrier", "_start_coalescing", "_end_coalescing")
_BATCHES = ("_start_coalescing", "_end_coalescing")
_OPERATIONS = """
    _allgather_base _end_coalescing _reduce_scatter_base _start_coalescing all_gather_single
    all_gather_single_coalesced all_to_all_single allgather allgather_coalesced allgather_into_tensor_coalesced
    allreduce allreduce_coalesced alltoall alltoall_base barrier broadcast gather monitored_barrier recv
    recv_anysource reduce reduce_scatter reduce_scatter_single reduce_scatter_single_coalesced
    reduce_scatter_tensor_coalesced scatter send
""".split()
_QUERIES = """
    _get_duration _get_op_type _source_rank block_current_stream exception get_future_result is_completed
    is_success result source_rank synchronize
""".split()

# the set of existing functions depends on the version of torch
for _name in filter(dist.ProcessGroup.__dict__.__contains__, _OPERATIONS):
    setattr(Group, _name, _make_operation(_name))
for _name in filter(dist.Work.__dict__.__contains__, _QUERIES):
    setattr(OperationHandle, _name, _make_query(_name))
