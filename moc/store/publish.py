"""From what every rank says that it has written to the manifest that makes it a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from moc.state.operators import Operator
from moc.store.errors import CheckpointError
from moc.store.manifest import Manifest, OperatorEntry, Part, merge

_PARAM = "param"


def assemble(
    parts: Iterable[Part],
    iteration: int,
    policy: str,
    writers: int,
    planned: Iterable[Operator],
    layout: Mapping[str, int],
    state: Mapping[str, object],
) -> Manifest:
    """Makes a manifest of parts, and refuses one that would lack something.

    Args:
        parts: of all ranks, or of those whose files are in one node's memory.
        iteration: iterations completed.
        policy: its name.
        writers: all ranks that write, over all nodes.
        planned: the operators that the checkpoint is to hold; each of its slots must have all parameters.
        layout: sizes of the layout.
        state: what is not a tensor.

    Raises:
        CheckpointError: an operator is missing or not whole, although the parts of all ranks are there.
    """
    files, operators = merge(parts)
    manifest = Manifest(iteration, policy, writers, files, operators, layout, state)
    if manifest.complete:
        for operator in planned:
            if lack := _lack(operator, operators.get(operator.name)):
                raise CheckpointError(f"the checkpoint of iteration {iteration} would lack {lack}: it is not published")
    return manifest


def _lack(operator: Operator, entry: OperatorEntry | None) -> str | None:
    if entry is None:
        return operator.name
    whole = [slot for slot in entry.elements if slot != _PARAM or entry.detail == "compute"]
    for slot in whole:
        if entry.elements[slot] != operator.parameters:
            return f"{operator.parameters - entry.elements[slot]} of {operator.parameters} {slot} of {operator.name}"
    return None if whole else f"all slots of {operator.name}"
