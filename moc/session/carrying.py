"""Carries experts from older snapshots in memory, in the background: see :mod:`moc.recovery.carrying`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from moc.errors import cause_of, code_of, warning
from moc.output import print_lines
from moc.policy import Policy, SnapshotPlan
from moc.recovery.carrying import Carrier
from moc.recovery.sources import MEMORY, AvailableCheckpoint
from moc.session.carriers import Carriers, RemoteCarrier
from moc.session.folds import Folds
from moc.session.tiers import Tiers
from moc.state.detail import Detail
from moc.state.operators import Operator
from moc.store.errors import CheckpointError

Coming = tuple[AvailableCheckpoint, Mapping[str, Detail], frozenset[str]]
"""A snapshot, its operators that other nodes receive copies of, and its operators with both state and gradients."""


def experts_of(policy: Policy) -> list[Operator]:
    """Returns the operators that may be older than the rest: the experts, unless the policy is exact."""
    return [one for one in policy.operators if one.expert is not None and not policy.is_exact]


class Carrying:
    """Background carrying of experts of this node's snapshots; inactive on workers that do not lead the node.

    With ``folds``, the gradients of their chains are applied in the background.
    """

    def __init__(self, tiers: Tiers, policy: Policy, carriers: Carriers, folds: Folds | None = None):
        self._folds, self._carriers = folds, carriers
        memory, self._experts = tiers.memory if tiers.leads_node else None, experts_of(policy)
        self._carrier = None if memory is None else RemoteCarrier(carriers, memory, self._experts)
        self._memory, self._before = memory, None if memory is None else tiers.before
        self._published, self._safe = threading.Condition(), 0
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

    def published(self, iteration: int) -> None:
        """Records that this node's part of a snapshot is committed in its memory."""
        with self._published:
            self._newest = iteration
            self._published.notify_all()

    def abandoned(self, iteration: int) -> None:
        """Deletes the experts carried for a snapshot that will not be committed: they may not suffice for the next one.

        Raises:
            CheckpointError, OSError: a manifest cannot be written.
        """
        if self._carrier is not None:
            self._carrier.delete()
        self.published(iteration)

    def release_before(self, iteration: int) -> None:
        """Reduces snapshots before a durable one to their carried experts, and clears superseded memory.

        Raises:
            CheckpointError, OSError: an older snapshot cannot be reduced.
        """
        self._safe = iteration
        if self._carrier is not None:
            self._carrier.retire(iteration)
        if self._memory is not None and self._before is not None and self._before.iterations():  # now superseded
            self._memory.storage.check_owner()
            self._before.remove_all()

    def close(self) -> None:
        """Abandons pending work."""
        with self._published:
            self._closed = True
            self._published.notify_all()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _carry(self, carrier: Carrier, coming: Coming, before: int | None) -> None:
        with self._published:
            self._published.wait_for(lambda: self._closed or before in (None, self._newest))
            if self._closed:
                return
        carry(carrier, self._safe, self._folds, *coming)


def carry(
    carrier: Carrier,
    safe: int,
    folds: Folds | None = None,
    coming: AvailableCheckpoint | None = None,
    copied: Collection[str] | None = None,
    compared: frozenset[str] = frozenset(),
) -> None:
    """Drops carried experts that a newer snapshot has, and carries the experts that the coming snapshot lacks.

    ``coming`` is described as for :meth:`Carrier.carry`; by default, it is the newest stored snapshot.  ``safe`` is the
    iteration of the newest durable one.  ``folds`` applies the gradients of chains, if wanted.
    """
    try:
        if folds is not None:
            folds.take_over(carrier)
        carrier.drop(safe)
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
