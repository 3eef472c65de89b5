"""Assembles the manifest of a checkpoint from the reports of its ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from moc.state.detail import Detail
from moc.state.operators import Operator
from moc.store.errors import CheckpointError
from moc.store.manifest import Manifest, OperatorEntry, RankReport, merge

_PARAM = "param"


def assemble(
    parts: Iterable[RankReport],
    iteration: int,
    policy: str,
    writers: int,
    planned: Iterable[Operator],
    layout: Mapping[str, int],
    state: Mapping[str, object],
) -> Manifest:
    """Builds a manifest from reports, and refuses an incomplete one.

    Args:
        parts: reports of all ranks, or of the ranks whose files are in one node's memory.
        iteration: iterations completed.
        policy: name of the policy.
        writers: number of ranks that write, over all nodes.
        planned: operators that the checkpoint must hold, with all parameters in each of their slots.
        layout: sizes of the layout.
        state: state that is not a tensor.

    Raises:
        CheckpointError: an operator is missing or partial although all ranks have reported, or reports contradict.
    """
    parts = list(parts)
    files, operators = merge(parts)
    digests = {part.name: part.digests for part in parts if part.digests is not None}
    manifest = Manifest(iteration, policy, writers, files, operators, layout, state, digests=digests)
    if manifest.complete:
        slots = _slots(operators.values())
        for operator in planned:
            if lack := _lack(operator, operators.get(operator.name), slots):
                raise CheckpointError(
                    f"the checkpoint of iteration {iteration} is not published: it lacks {lack}. Fix: let the ranks of "
                    "each pipeline stage describe all fragments of their operators",
                    code="operator-incomplete",
                )
    return manifest


def joined(manifests: Sequence[Manifest]) -> Manifest:
    """Merges the manifests of a checkpoint whose parts are in the memories of several nodes.

    Raises:
        CheckpointError: two nodes disagree about an operator, or hold parts of different launches.
    """
    parts = []
    for manifest in manifests:
        operators = [manifest.operators, *[{}] * (len(manifest.files) - 1)]  # covers all files, so count it once
        jobs = [manifest.job] * len(manifest.files)
        parts += map(RankReport, manifest.files, manifest.files.values(), operators, jobs)
    files, operators = merge(parts)
    digests = {name: found for manifest in manifests for name, found in manifest.digests.items()}
    return dataclasses.replace(manifests[0], files=files, operators=operators, digests=digests)


def _slots(entries: Iterable[OperatorEntry]) -> dict[str, set[str]]:
    """Returns the slots of each saved state subset, equal for all its operators; drops slots outside of the subset."""
    there: dict[str, set[str]] = {}
    for entry in entries:
        there.setdefault(entry.detail, set()).update(entry.elements)
    return {
        detail: {slot for slot in slots if Detail(detail).holds(slot) and (slot != _PARAM or detail == "compute")}
        for detail, slots in there.items()
    }


def _lack(operator: Operator, entry: OperatorEntry | None, slots: Mapping[str, set[str]]) -> str | None:
    if entry is None:
        return operator.name
    for slot in sorted(slots[entry.detail]):
        missing = operator.elements(slot) - entry.elements.get(slot, 0)
        if missing > 0 or (missing and slot != _PARAM):  # a router's biases are not among its parameters
            return f"{missing} of {operator.elements(slot)} {slot} of {operator.name}"
    return None if slots[entry.detail] else f"all slots of {operator.name}"
