"""Repairs the current window: during the replay, saves snapshots again that lost workers had not saved.

Without repair, each loss of a worker during a save would end the window.  Under repeated losses, no window would ever
complete, and recovery would use older and older snapshots.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from moc.errors import with_code
from moc.runtime.job import World
from moc.session.tiers import Tiers
from moc.snapshot.contents import Contents
from moc.snapshot.saver import Saver
from moc.state.detail import Detail
from moc.store.errors import CheckpointError


class Repair:
    """Saving of this worker's missing parts; the publisher finds them together with the parts of the other workers.

    Attributes:
        failure: error of a failed save; None if nothing failed.
    """

    def __init__(self, world: World, contents: Contents, tiers: Tiers, saver: Saver):
        self._world, self._contents, self._tiers, self._training = world, contents, tiers, saver
        self._torn: Mapping[int, Mapping[str, Detail]] = {}
        self._saver: Saver | None = None
        self.failure: str | None = None

    @contextlib.contextmanager
    def of(self, torn: Mapping[int, Mapping[str, Detail]]) -> Iterator[None]:
        """Context of a replay that may pass incomplete snapshots, given by iteration with their planned operators."""
        self._torn = torn
        self._saver = self._training.beside()
        with contextlib.closing(self._saver):
            yield

    def comes_by(self, iteration: int) -> None:
        """Saves this worker's part of the snapshot of the iteration that the replay has reached, if it is missing.

        It waits for the save.  A failure is kept in :attr:`failure`: recovery continues, and another window starts.
        """
        if iteration not in self._torn or self._has_part(iteration):
            return
        try:
            self._save(iteration)
        except CheckpointError as error:
            self.failure = with_code(error)

    def _save(self, iteration: int) -> None:
        assert self._saver is not None  # set by of()
        operators = self._torn[iteration]
        slot = list(self._torn).index(iteration)  # one slot per snapshot: in memory, the buffer is the file
        snapshot = self._saver.take(slot, iteration, self._contents.share(operators), self._contents.entries(operators))
        snapshot.sealed.result()
        if self._tiers.memory is None:
            self._saver.persist(snapshot)
            assert snapshot.persisted is not None  # persist() has begun it
            snapshot.persisted.result()

    def _has_part(self, iteration: int) -> bool:
        store = self._tiers.storage if self._tiers.memory is None else self._tiers.memory
        return store.has_all(iteration, [self._world.rank])
