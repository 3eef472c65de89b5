"""Carries experts from older snapshots in memory, in the background: see :mod:`moc.recovery.expert_versions`.

A separate process (:mod:`moc.session.carrier`) does the work.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from moc.cli_output import print_lines
from moc.errors import cause_of, code_of, warning
from moc.policy import Policy, SnapshotPlan, recovers_exactly
from moc.recovery.expert_versions import Carrier
from moc.recovery.gradient_chains import Chain
from moc.recovery.sources import MEMORY, AvailableCheckpoint
from moc.runtime.helper_process import HelperError, HelperProcess
from moc.session.folds import Folds
from moc.session.tiers import Tiers
from moc.state.operators import Detail, Operator
from moc.store.errors import CheckpointError
from moc.store.store import Store

Coming = tuple[AvailableCheckpoint, Mapping[str, Detail], frozenset[str]]
"""A snapshot, its operators that other nodes receive copies of, and its operators with both state and gradients."""


class Carriers:
    """Client of this worker's process that carries experts; starts it on demand, and again if it has died."""

    def __init__(self):
        self._helper, self._calling = HelperProcess("moc.session.carrier"), threading.Lock()
        self._opened: set[str] = set()

    def start(self) -> None:
        """Starts the process unless it runs.

        The process dies with the thread that starts it, so a long-lived thread should call this method.  The method
        does not wait for another thread's call, because training uses it for each snapshot.

        Raises:
            CheckpointError: the process cannot be started.
        """
        if not self._helper.is_running:
            with self._calling:
                self._start()

    def call(self, carrier: RemoteCarrier, does: str, **given: Any) -> Any:
        """Calls a method of a carrier in the process; returns its result as JSON values.

        Raises:
            CheckpointError: the call failed, or the process died or does not answer.
        """
        with self._calling:
            self._start()
            if carrier.name not in self._opened:
                self._ask(carrier, "open", carrier.described)
                self._opened.add(carrier.name)
            return self._ask(carrier, does, given)

    def close(self) -> None:
        """Kills the process."""
        self._helper.close()

    @property
    def processes(self) -> list[int]:
        """Process id, once the process has started."""
        return self._helper.pids

    def _start(self) -> None:
        with _as_checkpoint_error():
            if self._helper.start():
                self._opened.clear()

    def _ask(self, carrier: RemoteCarrier, does: str, given: dict[str, Any]) -> Any:
        with _as_checkpoint_error():
            answer = self._helper.call_process(
                {"memory": carrier.name, "compares": carrier.compares, "does": does, "given": given}
            )
        if "error" in answer:
            raise CheckpointError(answer["error"])
        return answer["value"]


class RemoteCarrier(Carrier):
    """Carrier that delegates background work to another process, and executes fast operations itself.

    Methods raise CheckpointError like :class:`~moc.recovery.expert_versions.Carrier`, and also if the process has died.
    """

    def __init__(self, carriers: Carriers, store: Store, experts: Iterable[Operator]):
        experts = list(experts)
        super().__init__(store, experts)
        claim = store.storage.claim
        self.described = {"claim": claim and asdict(claim), "experts": [asdict(one) for one in experts]}
        self._carriers = carriers

    def carry(
        self,
        coming: AvailableCheckpoint | None = None,
        copied: Collection[str] | None = None,
        compared: frozenset[str] = frozenset(),
    ) -> int:
        """See :class:`~moc.recovery.expert_versions.Carrier`."""
        plain = (0, {}) if coming is None else (coming.iteration, dict(coming.operators))
        names = None if copied is None else sorted(copied)
        return self._carriers.call(self, "carry", coming=plain, copied=names, compared=sorted(compared))

    def drop(self, upto: int) -> None:
        """See :class:`~moc.recovery.expert_versions.Carrier`."""
        self._carriers.call(self, "drop", upto=upto)

    def to_compare(self) -> list[Chain]:
        """See :class:`~moc.recovery.expert_versions.Carrier`."""
        return [Chain(*chain) for chain in self._carriers.call(self, "to_compare")]

    def to_fold(self, least: int) -> list[Chain]:
        """See :class:`~moc.recovery.expert_versions.Carrier`."""
        return [Chain(*chain) for chain in self._carriers.call(self, "to_fold", least=least)]

    def is_compared(self, experts: Collection[str]) -> None:
        """See :class:`~moc.recovery.expert_versions.Carrier`."""
        self._carriers.call(self, "is_compared", experts=sorted(experts))

    def compares_no_more(self) -> None:
        """See :class:`~moc.recovery.expert_versions.Carrier`."""
        if self.compares:
            self.compares = False
            self._carriers.call(self, "compares_no_more")

    def adopt(self) -> list[str]:
        """See :class:`~moc.recovery.expert_versions.Carrier`."""
        return self._carriers.call(self, "adopt")


@contextlib.contextmanager
def _as_checkpoint_error():
    try:
        yield
    except HelperError as error:
        raise CheckpointError(
            f"the process that carries experts {error}. Fix: read its output above; it starts again with the next "
            "snapshot",
            code="helper-lost",
        ) from None


def experts_of(policy: Policy) -> list[Operator]:
    """Returns the operators that may be older than the rest: the experts, unless the policy is exact."""
    return [one for one in policy.operators if one.expert is not None and not recovers_exactly(policy)]


class Carrying:
    """Background carrying of experts of this node's snapshots; inactive on workers that do not lead the node.

    With ``folds``, the gradients of their chains are applied in the background.
    """

    def __init__(self, tiers: Tiers, policy: Policy, carriers: Carriers, folds: Folds | None = None):
        self._folds, self._carriers = folds, carriers
        memory, self._experts = tiers.memory if tiers.leads_node else None, experts_of(policy)
        self._carrier = None if memory is None else RemoteCarrier(carriers, memory, self._experts)
        self._memory, self._before = memory, None if memory is None else tiers.before
        self._committed, self._durable = threading.Condition(), 0
        self._waits_for: int | None = None
        self._newest: int | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot-carry")

    @property
    def processes(self) -> list[int]:
        """Ids of the processes that carry experts and apply gradients."""
        return self._carriers.processes + (self._folds.processes if self._folds is not None else [])

    def begin(self, plan: SnapshotPlan) -> Future | None:
        """Starts to carry the experts that a snapshot lacks from earlier snapshots, once these are committed.

        Returns:
            A future, done when the snapshot may supersede the earlier ones; None if there is nothing to carry.
        """
        if self._carrier is None or not self._experts:
            return None
        with contextlib.suppress(CheckpointError):  # carry() warns, and retries
            self._carriers.start()
        before, self._waits_for = self._waits_for, plan.iteration
        details = {name: detail.value for name, detail in plan.operators.items()}
        coming = AvailableCheckpoint(plan.iteration, MEMORY, details)
        return self._thread.submit(
            self._carry, self._carrier, (coming, plan.remote_plan.operators, plan.compared), before
        )

    def committed(self, iteration: int) -> None:
        """Records that this node's part of a snapshot is committed in its memory."""
        with self._committed:
            self._newest = iteration
            self._committed.notify_all()

    def abandoned(self, iteration: int) -> None:
        """Deletes the experts carried for a snapshot that will not be committed: they may not suffice for the next one.

        Raises:
            CheckpointError, OSError: a manifest cannot be written.
        """
        if self._carrier is not None:
            self._carrier.delete()
        self.committed(iteration)

    def release_before(self, iteration: int) -> None:
        """Reduces snapshots before a durable one to their carried experts, and clears superseded memory.

        Raises:
            CheckpointError, OSError: an older snapshot cannot be reduced.
        """
        self._durable = iteration
        if self._carrier is not None:
            self._carrier.retire(iteration)
        if self._memory is not None and self._before is not None and self._before.iterations():  # now superseded
            self._memory.storage.check_owner()
            self._before.remove_all()

    def close(self) -> None:
        """Abandons pending work."""
        with self._committed:
            self._closed = True
            self._committed.notify_all()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _carry(self, carrier: Carrier, coming: Coming, before: int | None) -> None:
        with self._committed:
            self._committed.wait_for(lambda: self._closed or before in (None, self._newest))
            if self._closed:
                return
        carry(carrier, self._durable, self._folds, *coming)


def carry(
    carrier: Carrier,
    durable: int,
    folds: Folds | None = None,
    coming: AvailableCheckpoint | None = None,
    copied: Collection[str] | None = None,
    compared: frozenset[str] = frozenset(),
) -> None:
    """Drops carried experts that a newer snapshot has, and carries the experts that the coming snapshot lacks.

    ``coming`` is described as for :meth:`Carrier.carry`; by default, it is the newest stored snapshot.  ``durable`` is
    the iteration of the newest durable one.  ``folds`` applies the gradients of chains, if wanted.
    """
    try:
        if folds is not None:
            folds.take_over(carrier)
        carrier.drop(durable)
        carrier.carry(coming, copied, compared)
        if folds is not None:
            folds.go_on(carrier)
    except (CheckpointError, OSError) as error:
        if carrier.name not in _warned:
            _warned.add(carrier.name)
            print_lines(
                warning(
                    f"experts of older snapshots cannot be kept in {carrier.name} ({cause_of(error)}), and are read "
                    "from --ckpt-dir after a failure. Fix: make room, or name another memory with --ckpt-memory-dir",
                    code=code_of(error),
                ),
                error=True,
                flush=True,
            )


_warned: set[str] = set()
