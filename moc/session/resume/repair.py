"""Snapshots of the window under way that lost workers had not saved: they are saved again as the state comes by them.

Without it a window would be given up with each worker that is lost while it saves, and where workers are lost again and
again none would ever be whole: recovery would go further and further back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from moc.runtime.world import World
from moc.session.tiers import Tiers
from moc.snapshot.contents import Contents
from moc.snapshot.saver import Saver
from moc.state.detail import Detail
from moc.store.errors import CheckpointError


class Repair:
    """Saves this worker's parts again; who publishes finds them beside those that the others had saved.

    Args:
        world: this worker's place.
        contents: what this worker saves.
        tiers: where to.

    Attributes:
        failure: what could not be saved, and why; None if all was.
    """

    def __init__(self, world: World, contents: Contents, tiers: Tiers):
        self._world, self._contents, self._tiers = world, contents, tiers
        self._torn: Mapping[int, Mapping[str, Detail]] = {}
        self._saver: Saver | None = None
        self.failure: str | None = None

    @contextlib.contextmanager
    def of(self, torn: Mapping[int, Mapping[str, Detail]]) -> Iterator[None]:
        """While the state may come by snapshots that are not whole.

        Args:
            torn: by iteration, what was to be saved of the whole model.
        """
        self._torn = torn
        self._saver = Saver(self._world.rank, self._world.device, self._tiers.memory, self._tiers.storage)
        with contextlib.closing(self._saver):
            yield

    def comes_by(self, iteration: int) -> None:
        """The state is that of an iteration; returns when this worker's part of the snapshot is saved, if it was not.

        Where that fails, :attr:`failure` says so: recovery goes on, and another window begins.
        """
        if iteration not in self._torn or self._has_part(iteration):
            return
        try:
            self._save(iteration)
        except CheckpointError as error:
            self.failure = str(error)

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
