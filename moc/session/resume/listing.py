"""Lists the checkpoints in storage for a recovery, and reports a wait for storage."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from moc.errors import warning, with_code
from moc.recovery.inventory import Summary, in_storage, look
from moc.recovery.sources import AvailableCheckpoint
from moc.runtime.collectives import run_on_rank0
from moc.runtime.job import World
from moc.session.engine import Listener
from moc.session.resume.survivors import CommitReported, Survivors, publish_what_is_whole
from moc.session.tiers import LOOKING_S, Tiers
from moc.store.errors import CheckpointError
from moc.store.manifest import Manifest


class StorageListing:
    """Listing of storage by the first worker, for all workers.

    Args:
        tiers: tiers that snapshots go to.
        commit: commits parts that lost workers have reported, if storage is the only tier.
        world: ranks of the job.
        check: as for :func:`moc.recovery.inventory.look`.
        log: receives a message and an event.

    Attributes:
        is_done: storage has been taken and listed.
    """

    def __init__(
        self,
        tiers: Tiers,
        commit: CommitReported,
        world: World,
        check: Callable[[Manifest, str], None],
        log: Listener,
    ):
        self._tiers, self._storage, self._commit, self._world = tiers, tiers.storage, commit, world
        self._check_one, self._log = check, log
        self.is_done = False

    def find(self, left: Survivors) -> tuple[list[AvailableCheckpoint], list[str]]:
        """Returns the checkpoints in storage and the problems of invalid ones; a collective call.

        It waits for storage without a limit.

        Raises:
            CheckpointError: on all workers: all snapshots belong to another model or optimizer.
        """
        with self._reporting_wait() if left.again else contextlib.nullcontext():
            if self._tiers.memory is None:
                publish_what_is_whole(left, self._tiers, self._commit, self._world)
            stored, problems = run_on_rank0(self._look, f"cannot look for snapshots in {self._storage.storage.name}")
        self.is_done = True
        return in_storage(stored), problems

    @contextlib.contextmanager
    def _reporting_wait(self) -> Iterator[None]:
        """Context of a recovery's wait for storage."""
        name, begun = self._storage.storage.name, time.perf_counter()
        silent = warning(
            f"{name} has not answered for {LOOKING_S:.0f} s: the run waits for it, because the remaining workers lack "
            "state that it has. Fix: repair it",
            code="storage-silent",
        )
        timer = threading.Timer(LOOKING_S, self._log.message, [silent])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        seconds = round(time.perf_counter() - begun, 6)
        self._log.events.write("storage_awaited", where=name, seconds=seconds)

    def _look(self) -> tuple[list[Summary], list[str]]:
        """Takes ownership of storage, so that no older generation can commit, and lists it.

        If storage cannot be used, but there is a memory tier, the list is empty.

        Raises:
            CheckpointError: all snapshots belong to another model or optimizer.
        """
        try:
            self._storage.take()
        except OSError as error:
            if self._tiers.memory is None:
                raise
            unusable = CheckpointError(
                f"{self._storage.storage.name} cannot be used ({error.strerror or error}). Fix: correct its "
                "permissions or repair it",
                code="storage-unwritable",
            )
            return [], [with_code(unusable)]
        others: list[CheckpointError] = []

        def check(manifest: Manifest, where: str) -> None:
            try:
                self._check_one(manifest, where)
            except CheckpointError as error:
                others.append(error)
                raise

        found, problems = look(self._storage, check)
        if others and not found:
            raise others[-1]  # of the newest
        return found, problems
