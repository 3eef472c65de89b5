"""Chains of gradients: the full save, in an earlier checkpoint of the same directory, that each operator's follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moc.inspect.checkpoint import Checkpoint, read_checkpoint
from moc.state.detail import Detail
from moc.store.dense_files import directory_of
from moc.store.errors import CheckpointError

Details = Mapping[str, str]
"""By operator, its detail in a checkpoint."""


def bases(checkpoint: Checkpoint) -> dict[str, int]:
    """By operator with gradients in a checkpoint, the iteration of the full save that they follow.

    If the chain has a gap, it is the negative of the iteration that is missing.
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
    """As :func:`bases`, of the checkpoint of an iteration; ``there`` returns the details at any iteration."""
    found = {}
    for operator in (name for name, detail in there(iteration).items() if detail == Detail.GRAD.value):
        base = iteration
        while there(base).get(operator) == Detail.GRAD.value:
            base -= 1
        found[operator] = base if there(base).get(operator) == Detail.FULL.value else -base
    return found


def chain_problems(checkpoint: Checkpoint) -> list[str]:
    """The operators whose gradients are of no use, since a checkpoint before them is missing, one sentence each."""
    return [
        f"{operator}: its gradients follow the state of iteration {-base}, which is not there: keep all checkpoints of "
        "a chain"
        for operator, base in bases(checkpoint).items()
        if base <= 0
    ]


def _details(checkpoint: Checkpoint) -> Details:
    return {name: entry.detail for name, entry in (checkpoint.operators or {}).items()}
