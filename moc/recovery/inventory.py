"""What checkpoints there are, in storage and in the memory of the nodes that have survived."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moc.recovery.sources import COMPUTE, MEMORY, STORAGE, AvailableCheckpoint
from moc.state.operators import Operator
from moc.store.errors import CheckpointError
from moc.store.manifest import Manifest
from moc.store.store import Store, is_of_rank


class Summary(NamedTuple):
    """What a manifest says, as far as others need to know it.

    Attributes:
        iteration: iterations completed.
        writers: ranks that wrote, over all nodes.
        files: how many ranks' files it names.
        operators: by name the detail, and by slot how many elements these files hold.
        job: the launch that published it; empty where manifests do not tell.
        policy: name of the policy that planned it.
    """

    iteration: int
    writers: int
    files: int
    operators: dict[str, tuple[str, dict[str, int]]]
    job: str = ""
    policy: str = ""


def summary(manifest: Manifest) -> Summary:
    """The summary of a manifest."""
    operators = {name: (entry.detail, dict(entry.elements)) for name, entry in manifest.operators.items()}
    files = sum(map(is_of_rank, manifest.files))
    return Summary(manifest.iteration, manifest.writers, files, operators, manifest.job, manifest.policy)


def look(store: Store) -> tuple[list[Summary], list[str]]:
    """The checkpoints in a place, and what is wrong with those of which the manifest cannot be read."""
    summaries, problems = [], []
    for iteration in store.iterations():
        try:
            summaries.append(summary(store.manifest(iteration)))
        except CheckpointError as error:
            problems.append(str(error))
    return summaries, problems


def in_storage(summaries: Iterable[Summary]) -> list[AvailableCheckpoint]:
    """What storage holds: a checkpoint that is published there is complete."""
    return [
        AvailableCheckpoint(
            one.iteration, STORAGE, {name: detail for name, (detail, _) in one.operators.items()}, one.policy
        )
        for one in summaries
    ]


def in_memory(
    nodes: Iterable[Iterable[Summary]], operators: Sequence[Operator], tier: str = MEMORY
) -> list[AvailableCheckpoint]:
    """What the memory of all nodes that are there holds together.

    Where all ranks' files are there, all operators are whole; where a node is lost, those of which the others have all
    elements.  Of what several launches have left of one iteration, that counts of which there is most.

    Args:
        nodes: what each node holds.
        operators: of the model.
        tier: :data:`MEMORY`, or :data:`BEFORE`, of which experts alone are of use.
    """
    parts: dict[tuple[int, int, str], list[Summary]] = defaultdict(list)
    for node in nodes:
        for one in node:
            parts[one.iteration, one.writers, one.job].append(one)
    most: dict[int, tuple[int, int, str]] = {}
    for key, summaries in parts.items():
        best = most.setdefault(key[0], key)
        if sum(one.files for one in summaries) > sum(one.files for one in parts[best]):
            most[key[0]] = key
    sizes = {operator.name: operator.parameters for operator in operators}
    held, wanted = [], {operator.name for operator in operators if tier == MEMORY or operator.expert is not None}
    for iteration, writers, job in most.values():
        summaries = parts[iteration, writers, job]
        everything = sum(one.files for one in summaries) == writers
        details = {name: detail for one in summaries for name, (detail, _) in one.operators.items()}
        whole = {n: d for n, d in details.items() if n in wanted or tier == MEMORY}
        whole = {n: d for n, d in whole.items() if everything or _is_whole(n, sizes.get(n), summaries)}
        held.append(AvailableCheckpoint(iteration, tier, whole, summaries[0].policy))
    return held


def _is_whole(name: str, size: int | None, summaries: Iterable[Summary]) -> bool:
    elements, details = Counter(), set()
    for one in summaries:
        detail, there = one.operators.get(name, (None, {}))
        elements.update(there)
        details.add(detail)
    if COMPUTE in details:
        return size is not None and elements["param"] >= size  # a router's biases are not among its parameters
    slots = [slot for slot in elements if slot != "param"]
    return bool(slots) and all(elements[slot] == size for slot in slots)
