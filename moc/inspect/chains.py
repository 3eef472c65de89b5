"""Computes ages of experts and chains of gradients from the checkpoints of one directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moc.inspect.checkpoint import Checkpoint, read_checkpoint
from moc.policy import is_partial_policy
from moc.recovery.inventory import look
from moc.recovery.sources import MASTER, MOMENTS, PARTS
from moc.state.detail import Detail
from moc.store.dense_files import directory_of
from moc.store.errors import CheckpointError
from moc.store.storage import LocalPlace
from moc.store.store import Store

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


def ages(checkpoint: Checkpoint) -> dict[str, Age]:
    """Returns the age of each expert with a state in the checkpoint or in older ones of its directory.

    Empty if its policy leaves no experts to older checkpoints.
    """
    iteration = checkpoint.iteration
    if iteration is None or not is_partial_policy(checkpoint.policy):
        return {}
    summaries, _ = look(Store(LocalPlace(checkpoint.directory.resolve().parent)))
    older = {one.iteration: one.details for one in summaries if one.iteration < iteration}
    there = {iteration: _details(checkpoint)} | dict(sorted(older.items(), reverse=True))  # the newest first
    names = dict.fromkeys(name for details in there.values() for name in details if ".expert." in name)
    found = {}
    for name in names:
        newest = [_newest(there, name, part) for part in (MASTER, MOMENTS)]
        if None not in newest:
            base = until = min(filter(None, newest))
            while until < iteration and there.get(until + 1, {}).get(name) == Detail.GRAD.value:
                until += 1
            found[name] = Age(base, until, iteration - base)
    return found


def _newest(there: Mapping[int, Details], operator: str, part: str) -> int | None:
    return next((i for i, details in there.items() if part in PARTS.get(details.get(operator, ""), ())), None)


def bases(checkpoint: Checkpoint) -> dict[str, int]:
    """Returns, for each operator with gradients in a checkpoint, the iteration of the full save that they follow.

    If the chain has a gap, the value is the negative of the missing iteration.
    """
    root, known = checkpoint.directory.parent, {checkpoint.iteration: _details(checkpoint)}

    def there(iteration: int) -> Details:
        if iteration not in known:
            try:
                known[iteration] = _details(read_checkpoint(directory_of(root, iteration)))
            except CheckpointError:
                known[iteration] = {}
        return known[iteration]

    return {} if checkpoint.iteration is None else followed(checkpoint.iteration, there)


def followed(iteration: int, there: Callable[[int], Details]) -> dict[str, int]:
    """Returns the same as :func:`bases` for an iteration; ``there`` returns the details at any iteration."""
    found = {}
    for operator in (name for name, detail in there(iteration).items() if detail == Detail.GRAD.value):
        base = iteration
        while there(base).get(operator) == Detail.GRAD.value:
            base -= 1
        found[operator] = base if there(base).get(operator) == Detail.FULL.value else -base
    return found


def chain_problems(checkpoint: Checkpoint) -> list[str]:
    """Returns a sentence for each operator whose gradients are unusable because an earlier checkpoint is missing."""
    return [
        f"{operator}: its gradients follow the state of iteration {-base}, which is not there: keep all checkpoints of "
        "a chain"
        for operator, base in bases(checkpoint).items()
        if base <= 0
    ]


def _details(checkpoint: Checkpoint) -> Details:
    return {name: entry.detail for name, entry in (checkpoint.operators or {}).items()}
