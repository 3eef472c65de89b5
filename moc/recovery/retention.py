"""Which checkpoints in storage are still of use."""

from __future__ import annotations

from collections.abc import Sequence

from moc.recovery.inventory import in_storage, look
from moc.recovery.sources import needed
from moc.state.operators import Operator
from moc.store.store import Store


def retain(store: Store, operators: Sequence[Operator], exact: bool, keep: int, upto: int) -> None:
    """Removes what the newest ways to go on do not need, the oldest first.

    Checkpoints whose manifests cannot be read stay, and so do those that are newer than ``upto``, and those of a window
    that is not complete yet.

    Args:
        store: the checkpoints.
        operators: of the model.
        exact: as in :func:`moc.recovery.sources.recoveries`.
        keep: how many ways to go on are wanted.
        upto: iteration of the newest checkpoint of this run.
    """
    held = [one for one in in_storage(look(store)[0]) if one.iteration <= upto]
    kept = needed(held, operators, exact, keep)
    for one in held:
        if one.key not in kept:
            store.remove(one.iteration)
