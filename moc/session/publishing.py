"""The moment from which a snapshot counts: one worker writes the manifest, when all parts are there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait

from moc.faults import reach
from moc.policy import Policy, SnapshotPlan
from moc.recovery.retention import retain
from moc.runtime.world import World
from moc.session.engine import Listener
from moc.session.tiers import Tiers
from moc.snapshot.background import background
from moc.snapshot.saver import GivenUpError
from moc.store.errors import CheckpointError
from moc.store.publish import assemble
from moc.store.store import Store


class Publisher:
    """Publishes, in storage in a thread beside training; asks nothing of other workers.

    Args:
        world: this worker's place.
        policy: which planned what is published.
        tiers: where.
        layout: sizes of the layout, for the manifest.
        log: where to report.
    """

    def __init__(self, world: World, policy: Policy, tiers: Tiers, layout: Mapping[str, int], log: Listener):
        self._world, self._policy, self._tiers, self._layout, self._log = world, policy, tiers, layout, log
        self._operators = {operator.name: operator for operator in policy.operators}
        self._thread, self._given_up = background("snapshot-publish"), threading.Event()
        self._under_way: list[Future] = []

    def in_memory(self, plan: SnapshotPlan, state: dict) -> None:
        """Publishes the parts of this node's workers in its memory, at once.

        Raises:
            CheckpointError: something is missing, or cannot be written.
        """
        assert self._tiers.memory is not None  # or nobody asks for it
        self._publish(self._tiers.memory, plan, state, self._tiers.node)

    def reported(self, store: Store, iteration: int, state: dict, ranks: Iterable[int]) -> None:
        """Publishes at once what ranks have left word of: all that they were to save, whatever the plan was.

        Raises:
            CheckpointError: it cannot be written.
        """
        parts = store.reported(iteration, ranks)
        size = self._world.size
        store.publish(assemble(parts, iteration, self._policy.name, size, [], self._layout, state))

    def in_storage(self, plan: SnapshotPlan, state: dict, amount: int, write_s: float) -> Future:
        """Begins to publish the parts of all workers in storage, and to remove what is not needed any more.

        Args:
            plan: what has been written.
            state: what is not a tensor.
            amount: bytes that were written.
            write_s: seconds that it took.

        Returns:
            Done when it is published.
        """
        return self._begin(self._publish_in_storage, plan, state, amount, write_s)

    def gives_up(self, iteration: int) -> None:
        """Begins to remove from storage what was written of a snapshot that is not to be published."""
        self._begin(self._tiers.storage.give_up, iteration)

    def beside(self, action: Callable[[], None]) -> Future:
        """Begins something else with storage, when what was begun before has ended, by earlier generations too."""
        return self._begin(action)

    def close(self, patience: float = 0.0) -> None:
        """Gives up what is under way, which is not published after it.

        Args:
            patience: seconds that what has begun has left to end well.
        """
        wait([one for one in self._under_way if not one.cancel()], timeout=patience)
        self._given_up.set()

    def _begin(self, action: Callable, *args) -> Future:
        begun = self._thread.submit(action, *args)
        self._under_way = [*(one for one in self._under_way if not one.done()), begun]
        return begun

    def _publish_in_storage(self, plan: SnapshotPlan, state: dict, amount: int, write_s: float) -> None:
        begun, storage = time.perf_counter(), self._tiers.storage
        self._publish(storage, plan, state, range(self._world.size))
        reach("published")
        if plan.ends_window:
            self._retain(plan.iteration)
        publish_s = time.perf_counter() - begun
        self._log.events.write("persist", iteration=plan.iteration, bytes=amount, write_s=write_s, publish_s=publish_s)
        self._log.message(f"saved snapshot of iteration {plan.iteration} to {storage.place.name}")

    def _retain(self, upto: int) -> None:
        storage = self._tiers.storage
        try:
            self._unless_given_up()
            retain(storage, self._policy.operators, self._policy.exact, keep=self._tiers.keep, upto=upto)
        except OSError as error:  # the snapshot is safe all the same; the next one tries again
            self._log.message(
                f"WARNING: old snapshots cannot be removed from {storage.place.name} ({error.strerror or error})"
            )

    def _unless_given_up(self) -> None:
        if self._given_up.is_set():
            raise GivenUpError

    def _publish(self, store: Store, plan: SnapshotPlan, state: dict, ranks: Iterable[int]) -> None:
        try:
            parts = store.reported(plan.iteration, ranks)
            planned = [self._operators[name] for name in plan.operators]
            manifest = assemble(parts, plan.iteration, plan.policy, self._world.size, planned, self._layout, state)
            self._unless_given_up()
            store.publish(manifest)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of iteration {plan.iteration} cannot be published in {store.place.name} "
                f"({error.strerror or error}): make room or repair it, and start again; earlier ones are untouched"
            ) from error
