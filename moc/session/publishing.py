"""Commits snapshots: once all parts are present, one worker writes the manifest that makes the snapshot valid."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from types import MappingProxyType

from moc.errors import warning
from moc.faults import reach
from moc.policy import Policy, SnapshotPlan, recovers_exactly
from moc.recovery.redundancy import Redundancy
from moc.recovery.retention import retain
from moc.runtime.job import World
from moc.session.engine import Listener
from moc.session.tiers import Tiers
from moc.snapshot.background import GivenUpError, background, with_retries
from moc.store.errors import CheckpointError
from moc.store.manifest import RankReport, assemble
from moc.store.store import Store


class Publisher:
    """Committer of snapshots, in the background for storage; communicates with no other worker."""

    def __init__(
        self,
        world: World,
        policy: Policy,
        tiers: Tiers,
        layout: Mapping[str, int],
        log: Listener,
        redundancy: Redundancy,
    ):
        self._redundancy = redundancy
        self._world, self._policy, self._tiers, self._layout, self._log = world, policy, tiers, layout, log
        self._operators = {operator.name: operator for operator in policy.operators}
        self._thread, self._given_up = background("snapshot-publish"), threading.Event()
        self._under_way: list[Future] = []
        self._to_remove: set[int] = set()  # abandoned snapshots that may have files in storage

    def in_memory(self, plan: SnapshotPlan, state: dict, mine: RankReport) -> None:
        """Commits the parts of this node's workers in its memory before returning; ``mine`` is this worker's part.

        Raises:
            CheckpointError: a part is missing, or the manifest cannot be written.
        """
        assert self._tiers.memory is not None  # callers have a memory tier
        state = state | self._redundancy.state(plan.operators)
        self._publish(self._tiers.memory, plan, state, self._tiers.node, {self._world.rank: mine})

    def reported(self, store: Store, iteration: int, state: dict, ranks: Iterable[int]) -> None:
        """Commits the parts that ranks have reported, whatever the plan was, before returning.

        Raises:
            CheckpointError: the manifest cannot be written.
        """
        parts = store.read_reports(iteration, ranks)
        size = self._world.size
        if self._tiers.memory is not None:
            state = state | self._redundancy.state({name: None for part in parts for name in part.operators})
        store.publish(assemble(parts, iteration, self._policy.name, size, [], self._layout, state))

    def in_storage(
        self, plan: SnapshotPlan, state: dict, amount: int, write_s: float, pauses_s: Sequence[float] = ()
    ) -> Future:
        """Starts to commit the parts of all workers in storage, and to remove snapshots that are no longer needed.

        ``amount`` bytes were written in ``write_s`` seconds.  A failed commit is repeated after each of the pauses.
        The result is done when the snapshot is committed.
        """
        return self._begin(self._publish_in_storage, plan, state, amount, write_s, pauses_s)

    def gives_up(self, iteration: int) -> Future:
        """Starts to remove the written parts of an abandoned snapshot from storage.

        The result is done when they are removed.  A failed removal is repeated with the next one, and after the next
        commit that ends a window.
        """
        return self._begin(self._remove, iteration)

    def beside(self, action: Callable[[], None]) -> Future:
        """Starts another storage operation once all earlier ones, also of earlier generations, have ended."""
        return self._begin(action)

    def close(self, patience: float = 0.0) -> None:
        """Abandons work that does not complete within ``patience`` seconds; it is not committed afterwards."""
        wait([one for one in self._under_way if not one.cancel()], timeout=patience)
        self._given_up.set()

    def _begin(self, action: Callable, *args) -> Future:
        begun = self._thread.submit(action, *args)
        self._under_way = [*(one for one in self._under_way if not one.done()), begun]
        return begun

    def _remove(self, iteration: int) -> None:
        self._to_remove.add(iteration)
        self._remove_all()

    def _remove_all(self) -> None:
        errors: list[OSError] = []
        for iteration in sorted(self._to_remove):
            self._unless_given_up()
            try:
                self._tiers.storage.abandon_save(iteration)
                self._to_remove.remove(iteration)
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _publish_in_storage(
        self, plan: SnapshotPlan, state: dict, amount: int, write_s: float, pauses_s: Sequence[float]
    ) -> None:
        begun, storage = time.perf_counter(), self._tiers.storage
        publish = functools.partial(self._publish, storage, plan, state, range(self._world.size))
        with_retries(publish, pauses_s, self._given_up)
        reach("published")
        if plan.ends_window:
            self._retain(plan.iteration)
        publish_s = time.perf_counter() - begun
        self._log.events.write("persist", iteration=plan.iteration, bytes=amount, write_s=write_s, publish_s=publish_s)
        self._log.message(f"saved snapshot of iteration {plan.iteration} to {storage.storage.name}")

    def _retain(self, upto: int) -> None:
        storage = self._tiers.storage
        try:
            self._unless_given_up()
            retain(storage, self._policy.operators, recovers_exactly(self._policy), keep=self._tiers.keep, upto=upto)
            self._remove_all()
        except OSError as error:  # the snapshot is durable anyway; the next one retries
            self._log.message(
                warning(
                    f"old snapshots cannot be removed from {storage.storage.name} ({error.strerror or error}). Fix: "
                    "correct its permissions; the next snapshot tries again",
                    code="storage-unwritable",
                )
            )

    def _unless_given_up(self) -> None:
        if self._given_up.is_set():
            raise GivenUpError

    def _publish(
        self,
        store: Store,
        plan: SnapshotPlan,
        state: dict,
        ranks: Iterable[int],
        known: Mapping[int, RankReport] = MappingProxyType({}),
    ) -> None:
        try:
            parts = store.read_reports(plan.iteration, ranks, known)
            planned = [self._operators[name] for name in plan.operators]
            manifest = assemble(parts, plan.iteration, plan.policy, self._world.size, planned, self._layout, state)
            self._unless_given_up()
            store.publish(manifest)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of iteration {plan.iteration} cannot be published in {store.storage.name} "
                f"({error.strerror or error}), and earlier ones are unchanged. Fix: make room or repair it, and start "
                "again",
                code="storage-unwritable",
            ) from error
