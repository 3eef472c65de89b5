"""Finds the state of experts in older checkpoints of a directory: ages, chains of gradients, and missing experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from moc.inspect.checkpoint import Checkpoint, read_checkpoint
from moc.inspect.coverage import operators_of
from moc.policy import is_partial_policy
from moc.recovery.inventory import in_storage, list_checkpoints
from moc.recovery.sources import MASTER, MOMENTS, PARTS, AvailableCheckpoint, RecoveryPath, recovery_paths
from moc.state.operators import Detail
from moc.store.dense_files import checkpoint_path
from moc.store.errors import CheckpointError
from moc.store.storage import LocalStorage
from moc.store.store import Store, parse_iteration

Details = Mapping[str, str]
"""Detail of each operator in a checkpoint."""


@dataclass(frozen=True)
class Age:
    """Newest version of an expert in a directory, at the iteration of a checkpoint.

    Attributes:
        base: iteration of its newest saved state.
        until: last iteration whose gradients follow that state without a gap; ``base`` if there are none.
        age: iterations since its state was saved.
    """

    base: int
    until: int
    age: int

    def __str__(self) -> str:
        return f"{self.base}" + (f", gradients to {self.until}" if self.until > self.base else "")


def stored_expert_ages(checkpoint: Checkpoint) -> dict[str, Age]:
    """Returns the age of each expert with a state in the checkpoint or in older ones of its directory.

    Empty if its policy leaves no experts to older checkpoints.
    """
    iteration = checkpoint.iteration
    if iteration is None or not is_partial_policy(checkpoint.policy):
        return {}
    summaries, _ = list_checkpoints(Store(LocalStorage(checkpoint.directory.resolve().parent)))
    older = {summary.iteration: summary.details for summary in summaries if summary.iteration < iteration}
    details_by_iteration = {iteration: _details(checkpoint)} | dict(
        sorted(older.items(), reverse=True)
    )  # the newest first
    names = dict.fromkeys(name for details in details_by_iteration.values() for name in details if ".expert." in name)
    ages_by_expert = {}
    for name in names:
        newest = [_newest_iteration(details_by_iteration, name, part) for part in (MASTER, MOMENTS)]
        if None not in newest:
            base = until = min(filter(None, newest))
            while until < iteration and details_by_iteration.get(until + 1, {}).get(name) == Detail.GRAD.value:
                until += 1
            ages_by_expert[name] = Age(base, until, iteration - base)
    return ages_by_expert


def _newest_iteration(details_by_iteration: Mapping[int, Details], operator: str, part: str) -> int | None:
    return next(
        (i for i, details in details_by_iteration.items() if part in PARTS.get(details.get(operator, ""), ())), None
    )


def gradient_bases(checkpoint: Checkpoint) -> dict[str, int]:
    """Returns, for each operator with gradients in a checkpoint, the iteration of the full save that they follow.

    If the chain has a gap, the value is the negative of the missing iteration.
    """
    root, details = checkpoint.directory.parent, {checkpoint.iteration: _details(checkpoint)}

    def details_at(iteration: int) -> Details:
        if iteration not in details:
            try:
                details[iteration] = _details(read_checkpoint(checkpoint_path(root, iteration)))
            except CheckpointError:
                details[iteration] = {}
        return details[iteration]

    return {} if checkpoint.iteration is None else follow_gradients(checkpoint.iteration, details_at)


def follow_gradients(iteration: int, details_at: Callable[[int], Details]) -> dict[str, int]:
    """Returns :func:`gradient_bases` of an iteration; ``details_at`` returns the details at any iteration."""
    bases = {}
    for operator in (name for name, detail in details_at(iteration).items() if detail == Detail.GRAD.value):
        base = iteration
        while details_at(base).get(operator) == Detail.GRAD.value:
            base -= 1
        bases[operator] = base if details_at(base).get(operator) == Detail.FULL.value else -base
    return bases


def chain_problems(checkpoint: Checkpoint) -> list[str]:
    """Returns a sentence for each operator whose gradients are unusable because an earlier checkpoint is missing."""
    return [
        f"{operator}: its gradients follow the state of iteration {-base}, which is not there: keep all checkpoints of "
        "a chain"
        for operator, base in gradient_bases(checkpoint).items()
        if base <= 0
    ]


def _details(checkpoint: Checkpoint) -> Details:
    return {name: entry.detail for name, entry in (checkpoint.operators or {}).items()}


_NAMED = 8  # experts in a sentence


def storage_recovery_path(directory: Path) -> RecoveryPath | None:
    """Returns the recovery path at a checkpoint's iteration if only storage is left, without any gradients.

    Returns:
        None if its policy leaves no experts to older checkpoints, or if some state is in none of them.

    Raises:
        CheckpointError: the manifest cannot be read, or does not describe the shape of a model.
    """
    directory = directory.resolve()
    store, iteration = Store(LocalStorage(directory.parent)), parse_iteration(directory.name)
    if iteration is None:
        return None
    manifest = store.read_manifest(iteration)
    if not is_partial_policy(manifest.policy):
        return None
    try:
        operators = operators_of(manifest.state.get("shape"))
    except ValueError as error:
        raise CheckpointError(
            f"the state of the snapshot of iteration {iteration} {error}. Fix: use another snapshot",
            code="model-description-invalid",
        ) from None
    available = map(_without_gradients, in_storage(list_checkpoints(store)[0]))
    path = next(recovery_paths(available, operators, exact=False, only=iteration), None)
    return path if path is not None and len(path.points) == 1 else None


def _without_gradients(checkpoint: AvailableCheckpoint) -> AvailableCheckpoint:
    return replace(
        checkpoint, operators={n: detail for n, detail in checkpoint.operators.items() if detail != Detail.GRAD.value}
    )


def older_sources(path: RecoveryPath) -> dict[str, int]:
    """Returns, by expert whose state is older than the rest, the iteration of this state; oldest first."""
    older: dict[str, int] = {}
    for (name, _), source in path.sources.items():
        if source.iteration < path.iteration:
            older[name] = min(source.iteration, older.get(name, source.iteration))
    return dict(sorted(older.items(), key=lambda item: item[1]))


def count_chained_experts(directory: Path) -> int:
    """Returns the number of experts whose gradients follow the state that a run would load at a checkpoint."""
    return sum(age.until > age.base for age in stored_expert_ages(read_checkpoint(directory)).values())


def describe_older_experts(older: Mapping[str, int]) -> str:
    """Returns half a sentence with the number of older experts and their names, oldest first; there is at least one."""
    count = "1 expert is" if len(older) == 1 else f"{len(older):,} experts are"
    names_by_iteration: dict[int, list[str]] = {}
    for name, iteration in islice(older.items(), _NAMED):
        names_by_iteration.setdefault(iteration, []).append(name)
    iterations = "; ".join(
        f"{', '.join(names)} of iteration {iteration}" for iteration, names in names_by_iteration.items()
    )
    return f"{count} in older checkpoints: {iterations}" + (
        f"; and {len(older) - _NAMED:,} more" * (len(older) > _NAMED)
    )
