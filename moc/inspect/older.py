"""Finds experts that a partial checkpoint lacks in the older checkpoints of its directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

from moc.inspect.chains import ages
from moc.inspect.checkpoint import read_checkpoint
from moc.inspect.coverage import operators_of
from moc.policy import is_partial_policy
from moc.recovery.inventory import in_storage, look
from moc.recovery.sources import AvailableCheckpoint, RecoveryPath, recoveries
from moc.state.detail import Detail
from moc.store.errors import CheckpointError
from moc.store.storage import LocalPlace
from moc.store.store import Store, iteration_of

_NAMED = 8  # experts in a sentence


def recovery_from(directory: Path) -> RecoveryPath | None:
    """Returns the recovery path at a checkpoint's iteration if only storage is left, without any gradients.

    Returns:
        None if its policy leaves no experts to older checkpoints, or if some state is in none of them.

    Raises:
        CheckpointError: the manifest cannot be read, or does not describe the shape of a model.
    """
    directory = directory.resolve()
    store, iteration = Store(LocalPlace(directory.parent)), iteration_of(directory.name)
    if iteration is None:
        return None
    manifest = store.manifest(iteration)
    if not is_partial_policy(manifest.policy):
        return None
    try:
        operators = operators_of(manifest.state.get("shape"))
    except ValueError as error:
        raise CheckpointError(
            f"the state of the snapshot of iteration {iteration} {error}. Fix: use another snapshot",
            code="model-description-invalid",
        ) from None
    held = map(_without_gradients, in_storage(look(store)[0]))
    way = next(recoveries(held, operators, exact=False, only=iteration), None)
    return way if way is not None and len(way.moments) == 1 else None


def _without_gradients(one: AvailableCheckpoint) -> AvailableCheckpoint:
    return replace(one, operators={n: detail for n, detail in one.operators.items() if detail != Detail.GRAD.value})


def stale(way: RecoveryPath) -> dict[str, int]:
    """Returns, by expert whose state is older than the rest, the iteration of this state; oldest first."""
    older: dict[str, int] = {}
    for (name, _), held in way.sources.items():
        if held.iteration < way.iteration:
            older[name] = min(held.iteration, older.get(name, held.iteration))
    return dict(sorted(older.items(), key=lambda one: one[1]))


def chained(directory: Path) -> int:
    """Returns the number of experts whose gradients follow the state that a run would load at a checkpoint."""
    return sum(age.until > age.base for age in ages(read_checkpoint(directory)).values())


def sentence(older: Mapping[str, int]) -> str:
    """Returns half a sentence with the number of older experts and their names, oldest first; there is at least one."""
    count = "1 expert is" if len(older) == 1 else f"{len(older):,} experts are"
    named: dict[int, list[str]] = {}
    for name, iteration in islice(older.items(), _NAMED):
        named.setdefault(iteration, []).append(name)
    told = "; ".join(f"{', '.join(names)} of iteration {iteration}" for iteration, names in named.items())
    return f"{count} in older checkpoints: {told}" + (f"; and {len(older) - _NAMED:,} more" * (len(older) > _NAMED))
