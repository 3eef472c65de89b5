"""Repair of the current window: snapshots that lost workers had not saved are saved again during the replay.

Without repair, every worker lost while it saves would end the window; under repeated losses no window would ever
complete, and recovery would go further and further back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from moc.errors import with_code
from moc.runtime.world import World
from moc.session.tiers import Tiers
from moc.snapshot.contents import Contents
from moc.snapshot.saver import Saver
from moc.state.detail import Detail
from moc.store.errors import CheckpointError


class Repair:
    """Saves this worker's missing parts; the publisher finds them beside the parts of the others.

    Attributes:
        failure: what could not be saved, and why; None if nothing failed.
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
        """The state is that of an iteration: saves this worker's part of its snapshot, if missing, and waits for it.

        A failure is kept in :attr:`failure`: recovery continues, and another window starts.
        """
        if iteration not in self._torn or self._has_part(iteration):
            return
        try:
            self._save(iteration)
        except CheckpointError as error:
            self.failure = with_code(error)

    def _save(self, iteration: int) -> None:
        assert self._saver is not None  # while of() lasts
        operators = self._torn[iteration]
        slot = list(self._torn).index(iteration)  # its own: in memory the buffer is the file
        snapshot = self._saver.take(slot, iteration, self._contents.share(operators), self._contents.entries(operators))
        snapshot.sealed.result()
        if self._tiers.memory is None:
            self._saver.persist(snapshot)
            assert snapshot.persisted is not None  # persist() has begun it
            snapshot.persisted.result()

    def _has_part(self, iteration: int) -> bool:
        store = self._tiers.storage if self._tiers.memory is None else self._tiers.memory
        return store.has_all(iteration, [self._world.rank])
