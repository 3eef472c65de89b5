"""Summarizes the snapshots in storage and memory, which of them must stay, and which nodes provide absent nodes' parts.

Parts of absent nodes matter when a job resumes with other nodes. A snapshot in memory is complete only with the parts
of all nodes that wrote it. For each absent node, one node with copies *adopts* its parts. Each node then fetches the
operators that its ranks load.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moc.errors import cause_of, with_code
from moc.policy import Policy, SnapshotPlan, recovers_exactly
from moc.recovery.sources import (
    BEFORE,
    COMPUTE,
    LIVE,
    MEMORY,
    STORAGE,
    AvailableCheckpoint,
    RecoveryPath,
    needed,
    recoveries,
)
from moc.state.operators import Detail, Operator
from moc.store.errors import CheckpointError
from moc.store.manifest import Manifest, merge_manifests
from moc.store.store import Store, checkpoint_name, is_shard_file

COPIED = "copied"
"""Key in the state of a snapshot in memory: names of the operators that other nodes receive copies of, if not all."""


class Summary(NamedTuple):
    """Excerpt of a manifest for other workers; in memory, of a node's part of a snapshot.

    Attributes:
        iteration: iterations completed.
        writers: number of ranks that wrote, over all nodes.
        files: number of ranks' files in the manifest; 0 if the part was reduced to some experts, or is a copy of only
            some operators.
        operators: by name, the detail, and by slot the number of elements in these files.
        job: the launch that committed it; empty if the manifest has none.
        policy: name of the policy that planned it.
        copied: operators that other nodes receive copies of; None for all.
        alike: by operator, how many nodes save each of its elements, if several do.
    """

    iteration: int
    writers: int
    files: int
    operators: dict[str, tuple[str, dict[str, int]]]
    job: str = ""
    policy: str = ""
    copied: tuple[str, ...] | None = None
    alike: Mapping[str, int] = {}

    @property
    def snapshot(self) -> tuple[int, int, str]:
        """Identity of the snapshot that a node's part belongs to."""
        return self.iteration, self.writers, self.job

    @property
    def details(self) -> dict[str, str]:
        """Details by operator."""
        return {name: detail for name, (detail, _) in self.operators.items()}

    def shares(self, name: str, parameters: int) -> bool:
        """Returns whether other nodes' parts are needed for an operator with ``parameters`` parameters.

        Identical copies on other nodes are needed, too: each node resumes from its own memory.
        """
        return not self.has_all(name, parameters) or name in self.alike

    def has_all(self, name: str, parameters: int) -> bool:
        """Returns whether this part has every element of an operator with ``parameters`` parameters."""
        return max((n for slot, n in self.operators[name][1].items() if slot != "param"), default=0) >= parameters


def _accepts(manifest: Manifest, path: str) -> None:
    """Accepts every checkpoint."""


def summary(manifest: Manifest) -> Summary:
    """Returns the summary of a manifest."""
    operators = {name: (entry.detail, dict(entry.elements)) for name, entry in manifest.operators.items()}
    files, copied = sum(map(is_shard_file, manifest.files)), manifest.state.get(COPIED)
    copied = None if copied is None else tuple(copied)
    one = manifest
    return Summary(one.iteration, one.writers, files, operators, one.job, one.policy, copied, one.replica_counts)


def look(store: Store, check: Callable[[Manifest, str], None] = _accepts) -> tuple[list[Summary], list[str]]:
    """Returns the valid checkpoints in a store, and the problems of the others.

    Args:
        store: the store.
        check: receives the manifest and the path of a checkpoint; raises ValueError or CheckpointError if invalid.
    """
    summaries, problems = [], [with_code(_refused(one)) for one in store.describe_refused()]
    for iteration in store.iterations():
        path = store.storage.display_path(checkpoint_name(iteration))
        try:
            manifest = store.read_manifest(iteration)
            check(manifest, path)
            summaries.append(summary(manifest))
        except CheckpointError as error:
            problems.append(with_code(error))
        except ValueError as error:
            damage = CheckpointError(
                f"{path} has an invalid state ({cause_of(error)}). Fix: load another one (--ckpt-step)",
                code="checkpoint-damaged",
            )
            problems.append(with_code(damage))
    return summaries, problems


def _refused(problem: str) -> CheckpointError:
    return CheckpointError(f"{problem}. Fix: remove it, or replace it by a directory", code="file-refused")


def whole_in(operators: Sequence[Operator], parts: Sequence[Manifest]) -> Manifest:
    """Merges several nodes' parts of a snapshot, without operators that lack some of their elements.

    Raises:
        CheckpointError: parts contradict each other.
    """
    (held,) = in_memory([[summary(part)] for part in parts], operators)
    manifest = merge_manifests(parts)
    whole = {name: entry for name, entry in manifest.operators.items() if name in held.operators}
    return dataclasses.replace(manifest, operators=whole)


def in_storage(summaries: Iterable[Summary]) -> list[AvailableCheckpoint]:
    """Returns the checkpoints in storage; committed checkpoints are complete."""
    return [AvailableCheckpoint(one.iteration, STORAGE, one.details, one.policy) for one in summaries]


def in_memory(
    nodes: Iterable[Iterable[Summary]], operators: Sequence[Operator], tier: str = MEMORY
) -> list[AvailableCheckpoint]:
    """Returns the checkpoints in the combined memory of all surviving nodes, from summaries by node.

    If every rank's file is present, every operator is complete. Otherwise an operator is complete if the surviving
    nodes have all its elements. If several launches left parts of one iteration, the launch with the most files is
    used. In other tiers, such as :data:`BEFORE`, only experts are used.
    """
    parts: dict[tuple[int, int, str], list[Summary]] = defaultdict(list)
    for node in nodes:
        for one in node:
            parts[one.snapshot].append(one)
    most: dict[int, tuple[int, int, str]] = {}
    for key, summaries in parts.items():
        best = most.setdefault(key[0], key)
        if sum(one.files for one in summaries) > sum(one.files for one in parts[best]):
            most[key[0]] = key
    sizes = {operator.name: operator for operator in operators}
    held, wanted = [], {operator.name for operator in operators if tier == MEMORY or operator.expert is not None}
    for iteration, writers, job in most.values():
        summaries = parts[iteration, writers, job]
        everything = sum(one.files for one in summaries) == writers
        details = {name: detail for one in summaries for name, detail in one.details.items()}
        whole = {n: d for n, d in details.items() if n in wanted or tier == MEMORY}
        whole = {n: d for n, d in whole.items() if everything or _is_whole(n, sizes.get(n), summaries)}
        held.append(AvailableCheckpoint(iteration, tier, whole, summaries[0].policy))
    return held


def _is_whole(name: str, operator: Operator | None, summaries: Iterable[Summary]) -> bool:
    elements, details, copies = Counter(), set(), 1
    for one in summaries:
        detail, there = one.operators.get(name, (None, {}))
        elements.update({slot: n for slot, n in there.items() if detail and Detail(detail).holds(slot)})
        details.add(detail)
        copies = max(copies, one.alike.get(name, 1))
    if operator is None:
        return False
    if COMPUTE in details:
        return elements["param"] >= operator.parameters * copies  # a router's parameters exclude its biases
    slots = [slot for slot in elements if slot != "param"]
    return bool(slots) and all(elements[slot] == operator.elements(slot) * copies for slot in slots)


@dataclass(frozen=True)
class Persisted:
    """State that a run would resume with if all memory were lost.

    Attributes:
        iteration: that it would resume from; 0 if storage has no recovery path.
        learned: by operator, the last iteration whose update its state has; empty without a recovery path.
    """

    iteration: int = 0
    learned: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, held: Iterable[AvailableCheckpoint], policy: Policy) -> Persisted:
        """Finds the state among checkpoints; tiers other than storage are ignored."""
        stored = [one for one in held if one.tier == STORAGE]
        way = next(recoveries(stored, policy.operators, recovers_exactly(policy)), None)
        if way is None:
            return cls()
        return cls(way.iteration, {one.name: way.learned_until(one.name) for one in policy.operators})


@dataclass(frozen=True)
class Promise:
    """Maximum age, in iterations, of an operator's newest state in storage while storage keeps up.

    Attributes:
        state: of dense operators, or of all operators if the policy is exact.
        experts: of experts; None if the policy promises nothing.
    """

    state: int
    experts: int | None

    @classmethod
    def of(cls, policy: Policy, every: int, outstanding: int, commits: int) -> Promise:
        """Returns the promise of a policy.

        Storage keeps up if it writes each snapshot (with windows: each window) before the next one is due. A state
        waits for ``storage.cycle`` snapshots. The last of them may follow outstanding ones, ends with its window, and
        is known to be committed after some commit all-reduces.

        Args:
            policy: with the current settings.
            every: iterations between snapshots for storage.
            outstanding: snapshots that may be written to storage at the same time.
            commits: iterations until a snapshot is known to be committed if its write takes no time.
        """
        apart = policy.schedule.snapshot_interval
        step = -(-max(every, apart) // apart) * apart
        late = 2 * policy.schedule.window_length + commits
        cycle = policy.storage.cycle
        return cls((1 + outstanding) * step + late, None if cycle is None else (cycle + outstanding) * step + late)


def overdue(
    persisted: Persisted, promise: Promise, operators: Sequence[Operator], iteration: int, since: int
) -> list[str]:
    """Returns the operators whose newest state in storage is older than promised, in model order.

    Args:
        persisted: state in storage.
        promise: of the policy.
        operators: of the model.
        iteration: iterations completed.
        since: iteration of the first snapshot that was due after this start.
    """
    found = []
    for one in operators:
        most = promise.state if one.expert_id is None else promise.experts
        if most is not None and iteration - max(since, persisted.learned.get(one.name, 0)) > most:
            found.append(one.name)
    return found


def newest_full(held: Iterable[AvailableCheckpoint]) -> dict[str, int]:
    """Returns, by operator, the iteration of its newest full save in some checkpoints; omits operators without one."""
    found: dict[str, int] = {}
    for one in held:
        for name, detail in one.operators.items():
            if detail == Detail.FULL.value:
                found[name] = max(found.get(name, 0), one.iteration)
    return found


def is_of(policy: Policy, way: RecoveryPath) -> bool:
    """Returns whether a policy planned all checkpoints of a path, except survivor state.

    Other policies' checkpoints have no token counts for this one.
    """
    return all(one.tier == LIVE or one.policy == policy.name for one in way.used())


def in_storage_alone(held: Iterable[AvailableCheckpoint], policy: Policy) -> bool:
    """Returns whether a run could resume from its own policy's checkpoints in storage."""
    stored = [one for one in held if one.tier == STORAGE]
    return any(is_of(policy, way) for way in recoveries(stored, policy.operators, recovers_exactly(policy)))


def retain(store: Store, operators: Sequence[Operator], exact: bool, keep: int, upto: int) -> None:
    """Removes checkpoints that the newest ``keep`` recovery paths do not need, the oldest first.

    Checkpoints with unreadable manifests stay. So do checkpoints newer than ``upto``, the newest of this run, and
    checkpoints of an incomplete window.
    """
    held = [one for one in in_storage(look(store)[0]) if one.iteration <= upto]
    kept = needed(held, operators, exact, keep)
    for one in held:
        if one.key not in kept:
            store.remove(one.iteration)


@dataclass(frozen=True)
class Staying:
    """Checkpoints that a resuming run keeps.

    Attributes:
        newest: iteration of the newest recovery path; None if there is none.
        in_memory: iterations of the needed snapshots in memory, ascending: of the newest path if it is in memory, and
            of the current window.
        again: the missing snapshot of the current window, if only that of the resumed iteration is missing: it can be
            taken again.
        goes_on: the current window continues; otherwise another one starts.
    """

    newest: int | None = None
    in_memory: tuple[int, ...] = ()
    again: SnapshotPlan | None = None
    goes_on: bool = True


class Experts(NamedTuple):
    """Snapshots in memory that a run has taken experts from, and may need again.

    Attributes:
        older: iterations up to the resumed one, except snapshots that stay anyway.
        newer: iterations after the resumed one; the run will take these snapshots again.
        before: iterations of snapshots that were already moved to superseded memory.
    """

    older: tuple[int, ...] = ()
    newer: tuple[int, ...] = ()
    before: tuple[int, ...] = ()


def experts_staying(used: Iterable[AvailableCheckpoint], in_memory: Collection[int], iteration: int) -> Experts:
    """Returns the snapshots whose experts a run must keep after an inexact recovery, until newer ones are durable."""
    used = sorted(used, key=lambda one: one.iteration)
    others = [one.iteration for one in used if one.tier == MEMORY and one.iteration not in in_memory]
    return Experts(
        tuple(other for other in others if other <= iteration),
        tuple(other for other in others if other > iteration),
        tuple(one.iteration for one in used if one.tier == BEFORE),
    )


def staying(
    held: Collection[AvailableCheckpoint],
    operators: Sequence[Operator],
    exact: bool,
    tier: str,
    iteration: int,
    window: Sequence[SnapshotPlan],
) -> Staying:
    """Returns the checkpoints that stay when a run resumes from an iteration; identical on all ranks.

    Args:
        held: available checkpoints.
        operators: of the model.
        exact: as in :func:`moc.recovery.sources.recoveries`.
        tier: where a snapshot is durable, :data:`~moc.recovery.sources.MEMORY` or
            :data:`~moc.recovery.sources.STORAGE`.
        iteration: that the run resumes from.
        window: plans of the current window up to and including that iteration; empty if unknown.
    """
    past = [one for one in held if one.iteration <= iteration]
    way = next(recoveries(past, operators, exact), None)
    newest = None if way is None else way.iteration
    kept: list[int] = []
    if way is not None:
        of_path = way.used() if exact else [way.at(moment.iteration) for moment in way.moments]
        if all(one.tier == MEMORY for one in of_path):
            kept = sorted({one.iteration for one in of_path})
    if newest == iteration:
        return Staying(newest, tuple(kept))
    missing = [plan for plan in window if not any(one.has(plan.iteration, tier, plan.operators) for one in past)]
    if not window or missing not in ([], [window[-1]]):
        return Staying(newest, tuple(kept), goes_on=False)
    if tier == MEMORY:
        kept = sorted({*kept, *(plan.iteration for plan in window if plan not in missing)})
    return Staying(newest, tuple(kept), missing[0] if missing else None)


class NodeInventory(NamedTuple):
    """Contents of a node's memory: its own parts, and by node the copies of other nodes' parts."""

    own: Sequence[Summary]
    copies: Mapping[str, Sequence[Summary]]


class Fetch(NamedTuple):
    """Operators to fetch, each with its detail, from the node that has this part of a snapshot."""

    iteration: int
    of: str
    held_by: str
    operators: Mapping[str, str]


def adopters(nodes: Mapping[str, NodeInventory]) -> dict[str, str]:
    """Returns, by absent node, the present node that adopts its parts: one with the newest copy."""
    holders: dict[str, list[str]] = {}
    for node in sorted(nodes):
        for of, parts in nodes[node].copies.items():
            if of not in nodes and parts:
                holders.setdefault(of, []).append(node)
    return {of: max(there, key=lambda node: _newest(nodes[node].copies[of])) for of, there in holders.items()}


def to_fetch(
    node: str, wanted: Mapping[int, Collection[str]], nodes: Mapping[str, NodeInventory], sizes: Mapping[str, int]
) -> list[Fetch]:
    """Returns the fetches of a node for its ranks, in a fixed order.

    An operator with identical copies on several nodes is fetched from one that has all of it, unless it is local.

    Args:
        node: name of the node.
        wanted: by iteration of a snapshot, the operators that the node's ranks load.
        nodes: inventories of all nodes.
        sizes: by operator, its number of parameters.
    """
    adopted = adopters(nodes)
    parts = {of: (of, nodes[of].own) for of in nodes}
    parts |= {of: (holder, nodes[holder].copies[of]) for of, holder in adopted.items()}
    here = {of for of, (holder, _) in parts.items() if holder == node}
    fetches: list[Fetch] = []
    for iteration, names in sorted(wanted.items()):
        of_it = {of: part for of, (_, own) in parts.items() for part in own if part.iteration == iteration}
        whole: set[str] = set()  # operators with identical copies
        for of in sorted(of_it, key=lambda of: (of not in here, of)):
            part, operators = of_it[of], {}
            for name in sorted(part.details.keys() & names):
                if name not in part.alike:
                    operators[name] = part.details[name]
                elif name not in whole and part.has_all(name, sizes[name]):
                    whole.add(name)
                    operators[name] = part.details[name]
            if operators and of not in here:
                fetches.append(Fetch(iteration, of, parts[of][0], operators))
    return fetches


def _newest(parts: Iterable[Summary]) -> int:
    return max(part.iteration for part in parts)
