"""Updates operators by saved gradients: MoEtion's recomputation of the optimizer (section 5.2, Algorithm 3).

    for each iteration whose gradients a checkpoint has, ascending:
        restore learning rate, weight decay, loss scale and update counts from the checkpoint before it
        update the operators with only these gradients, clipped by the recorded norm; nothing, if it was skipped

Updates are elementwise, and run through the optimizer of the engine.  In the same layout, with the same kernels, the
result is bit-identical to the original update.
"""

from __future__ import annotations

from collections.abc import Mapping

from moc.errors import with_code
from moc.faults import reach
from moc.recovery.sources import MASTER, AvailableCheckpoint, ReplayPoint
from moc.session.engine import Engine
from moc.session.resume.reading import Key, Problem, SnapshotReader
from moc.session.resume.replay import record_of
from moc.store.errors import CheckpointError, MissingTensorError
from moc.store.manifest import Manifest


class Folder:
    """Applier of saved gradients to this worker's state; communicates with no other worker."""

    def __init__(self, engine: Engine, reader: SnapshotReader):
        self._engine, self._reader = engine, reader

    def fold(self, moment: ReplayPoint, manifests: Mapping[Key, Manifest]) -> Problem | None:
        """Updates the loaded operators of a replay point by all of their gradients.

        Returns:
            A problem with a checkpoint, after which the state must be loaded again; or None.
        """
        mine = self._reader.folded_at(moment)
        steps = {one.key: one for name in mine for one in moment.folds[name]}
        for number, key in enumerate(sorted(steps)):
            if number:
                reach("folding")
            before = {name: held for name in mine if (held := _before(moment, name, key)) is not None}
            try:
                self._update(steps[key], before, manifests)
            except (CheckpointError, MissingTensorError, OSError) as error:
                return self._reader.problem(steps[key], manifests[key], with_code(error))
        return None

    def _update(
        self, held: AvailableCheckpoint, before: Mapping[str, AvailableCheckpoint], manifests: Mapping[Key, Manifest]
    ) -> None:
        """Repeats the update of operators by a checkpoint's gradients; ``before`` has their previous checkpoints."""
        record = record_of(manifests[held.key].state, self._reader.where(held))
        if record.skipped:
            return
        counts = {name: manifests[one.key].operators[name].step for name, one in before.items()}
        self._engine.state.set_steps({name: count for name, count in counts.items() if count is not None})
        first = next(iter(before.values()))  # all are of one iteration
        self._engine.load_scalars(manifests[first.key].state, self._reader.where(first))
        self._engine.apply(record, self._reader.values(held, manifests[held.key]), before.keys())


def _before(moment: ReplayPoint, operator: str, key: Key) -> AvailableCheckpoint | None:
    """Returns the checkpoint that precedes checkpoint ``key`` in an operator's chain, if any."""
    chain = [moment.sources[operator, MASTER], *moment.folds[operator]]
    return next((before for before, after in zip(chain, chain[1:], strict=False) if after.key == key), None)
