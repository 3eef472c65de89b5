"""Summarizes the snapshots in storage and memory, the ones to retain, and the nodes that provide absent nodes' parts.

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
    recovery_paths,
)
from moc.state.operators import Detail, Operator
from moc.store.errors import CheckpointError, for_each
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
        replica_counts: by operator, how many nodes save each of its elements, if several do.
    """

    iteration: int
    writers: int
    files: int
    operators: dict[str, tuple[str, dict[str, int]]]
    job: str = ""
    policy: str = ""
    copied: tuple[str, ...] | None = None
    replica_counts: Mapping[str, int] = {}

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
        return not self.has_all(name, parameters) or name in self.replica_counts

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
    return Summary(
        iteration=manifest.iteration,
        writers=manifest.writers,
        files=files,
        operators=operators,
        job=manifest.job,
        policy=manifest.policy,
        copied=copied,
        replica_counts=manifest.replica_counts,
    )


def list_checkpoints(
    store: Store, check: Callable[[Manifest, str], None] = _accepts
) -> tuple[list[Summary], list[str]]:
    """Returns the valid checkpoints in a store, and the problems of the others.

    Args:
        store: the store.
        check: receives the manifest and the path of a checkpoint; raises ValueError or CheckpointError if invalid.
    """
    summaries, problems = [], [with_code(_refused(problem)) for problem in store.describe_refused()]
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


def merge_complete(operators: Sequence[Operator], parts: Sequence[Manifest]) -> Manifest:
    """Merges several nodes' parts of a snapshot, without operators that lack some of their elements.

    Raises:
        CheckpointError: parts contradict each other.
    """
    (merged,) = in_memory([[summary(manifest_part)] for manifest_part in parts], operators)
    manifest = merge_manifests(parts)
    complete = {name: entry for name, entry in manifest.operators.items() if name in merged.operators}
    return dataclasses.replace(manifest, operators=complete)


def in_storage(summaries: Iterable[Summary]) -> list[AvailableCheckpoint]:
    """Returns the checkpoints in storage; committed checkpoints are complete."""
    return [AvailableCheckpoint(part.iteration, STORAGE, part.details, part.policy) for part in summaries]


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
        for part in node:
            parts[part.snapshot].append(part)
    best_key: dict[int, tuple[int, int, str]] = {}
    for key, summaries in parts.items():
        best_so_far = best_key.setdefault(key[0], key)
        if sum(part.files for part in summaries) > sum(part.files for part in parts[best_so_far]):
            best_key[key[0]] = key
    sizes = {operator.name: operator for operator in operators}
    checkpoints, names = [], {operator.name for operator in operators if tier == MEMORY or operator.expert is not None}
    for iteration, writers, job in best_key.values():
        summaries = parts[iteration, writers, job]
        has_all_files = sum(part.files for part in summaries) == writers
        details = {name: detail for part in summaries for name, detail in part.details.items()}
        complete = {n: d for n, d in details.items() if n in names or tier == MEMORY}
        complete = {n: d for n, d in complete.items() if has_all_files or _is_complete(n, sizes.get(n), summaries)}
        checkpoints.append(AvailableCheckpoint(iteration, tier, complete, summaries[0].policy))
    return checkpoints


def _is_complete(name: str, operator: Operator | None, summaries: Iterable[Summary]) -> bool:
    elements, details, copies = Counter(), set(), 1
    for part in summaries:
        detail, counts = part.operators.get(name, (None, {}))
        elements.update({slot: n for slot, n in counts.items() if detail and Detail(detail).holds(slot)})
        details.add(detail)
        copies = max(copies, part.replica_counts.get(name, 1))
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
    def of(cls, checkpoints: Iterable[AvailableCheckpoint], policy: Policy) -> Persisted:
        """Finds the state among checkpoints; tiers other than storage are ignored."""
        stored = [checkpoint for checkpoint in checkpoints if checkpoint.tier == STORAGE]
        path = next(recovery_paths(stored, policy.operators, recovers_exactly(policy)), None)
        if path is None:
            return cls()
        return cls(path.iteration, {operator.name: path.learned_until(operator.name) for operator in policy.operators})


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
        interval = policy.schedule.snapshot_interval
        step = -(-max(every, interval) // interval) * interval
        delay = 2 * policy.schedule.window_length + commits
        cycle = policy.storage.cycle
        return cls((1 + outstanding) * step + delay, None if cycle is None else (cycle + outstanding) * step + delay)


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
    names = []
    for operator in operators:
        limit = promise.state if operator.expert_id is None else promise.experts
        if limit is not None and iteration - max(since, persisted.learned.get(operator.name, 0)) > limit:
            names.append(operator.name)
    return names


def newest_full(checkpoints: Iterable[AvailableCheckpoint]) -> dict[str, int]:
    """Returns, by operator, the iteration of its newest full save in some checkpoints; omits operators without one."""
    newest: dict[str, int] = {}
    for checkpoint in checkpoints:
        for name, detail in checkpoint.operators.items():
            if detail == Detail.FULL.value:
                newest[name] = max(newest.get(name, 0), checkpoint.iteration)
    return newest


def is_planned_by(policy: Policy, path: RecoveryPath) -> bool:
    """Returns whether a policy planned all checkpoints of a path, except survivor state.

    Other policies' checkpoints have no token counts for this one.
    """
    return all(checkpoint.tier == LIVE or checkpoint.policy == policy.name for checkpoint in path.checkpoints())


def storage_suffices(checkpoints: Iterable[AvailableCheckpoint], policy: Policy) -> bool:
    """Returns whether a run could resume from its own policy's checkpoints in storage."""
    stored = [checkpoint for checkpoint in checkpoints if checkpoint.tier == STORAGE]
    return any(
        is_planned_by(policy, path) for path in recovery_paths(stored, policy.operators, recovers_exactly(policy))
    )


def retain(store: Store, operators: Sequence[Operator], exact: bool, keep: int, upto: int) -> None:
    """Removes checkpoints that the newest ``keep`` recovery paths do not need, the oldest first.

    Checkpoints with unreadable manifests are retained. So are checkpoints newer than ``upto``, the newest of this run,
    and checkpoints of an incomplete window.

    Raises:
        OSError: a checkpoint cannot be removed; the others are.
    """
    checkpoints = [checkpoint for checkpoint in in_storage(list_checkpoints(store)[0]) if checkpoint.iteration <= upto]
    needed_keys = needed(checkpoints, operators, exact, keep)
    for_each((checkpoint.iteration for checkpoint in checkpoints if checkpoint.key not in needed_keys), store.remove)


@dataclass(frozen=True)
class RetainedCheckpoints:
    """Checkpoints that a resuming run keeps.

    Attributes:
        newest: iteration of the newest recovery path; None if there is none.
        in_memory: iterations of the needed snapshots in memory, ascending: of the newest path if it is in memory, and
            of the current window.
        repeated_plan: the missing snapshot of the current window, if only that of the resumed iteration is missing: it
            can be taken again.
        continues_window: the current window continues; otherwise another one starts.
    """

    newest: int | None = None
    in_memory: tuple[int, ...] = ()
    repeated_plan: SnapshotPlan | None = None
    continues_window: bool = True


class RetainedExperts(NamedTuple):
    """Snapshots in memory that a run has taken experts from, and may need again.

    Attributes:
        older: iterations up to the resumed one, except snapshots that are retained anyway.
        newer: iterations after the resumed one; the run will repeat these snapshots.
        before: iterations of snapshots that were already moved to superseded memory.
    """

    older: tuple[int, ...] = ()
    newer: tuple[int, ...] = ()
    before: tuple[int, ...] = ()


def retained_experts(
    used: Iterable[AvailableCheckpoint], in_memory: Collection[int], iteration: int
) -> RetainedExperts:
    """Returns the snapshots whose experts a run must keep after an inexact recovery, until newer ones are durable."""
    used = sorted(used, key=lambda checkpoint: checkpoint.iteration)
    iterations = [
        checkpoint.iteration
        for checkpoint in used
        if checkpoint.tier == MEMORY and checkpoint.iteration not in in_memory
    ]
    return RetainedExperts(
        tuple(older for older in iterations if older <= iteration),
        tuple(older for older in iterations if older > iteration),
        tuple(checkpoint.iteration for checkpoint in used if checkpoint.tier == BEFORE),
    )


def retained_checkpoints(
    checkpoints: Collection[AvailableCheckpoint],
    operators: Sequence[Operator],
    exact: bool,
    tier: str,
    iteration: int,
    window: Sequence[SnapshotPlan],
) -> RetainedCheckpoints:
    """Returns the checkpoints to retain when a run resumes from an iteration; identical on all ranks.

    Args:
        checkpoints: available checkpoints.
        operators: of the model.
        exact: as in :func:`moc.recovery.sources.recovery_paths`.
        tier: where a snapshot is durable, :data:`~moc.recovery.sources.MEMORY` or
            :data:`~moc.recovery.sources.STORAGE`.
        iteration: that the run resumes from.
        window: plans of the current window up to and including that iteration; empty if unknown.
    """
    past = [checkpoint for checkpoint in checkpoints if checkpoint.iteration <= iteration]
    path = next(recovery_paths(past, operators, exact), None)
    newest = None if path is None else path.iteration
    iterations: list[int] = []
    if path is not None:
        path_checkpoints = (
            path.checkpoints() if exact else [path.checkpoint_at(point.iteration) for point in path.points]
        )
        if all(checkpoint.tier == MEMORY for checkpoint in path_checkpoints):
            iterations = sorted({checkpoint.iteration for checkpoint in path_checkpoints})
    if newest == iteration:
        return RetainedCheckpoints(newest, tuple(iterations))
    missing = [
        plan for plan in window if not any(checkpoint.has(plan.iteration, tier, plan.operators) for checkpoint in past)
    ]
    if not window or missing not in ([], [window[-1]]):
        return RetainedCheckpoints(newest, tuple(iterations), continues_window=False)
    if tier == MEMORY:
        iterations = sorted({*iterations, *(plan.iteration for plan in window if plan not in missing)})
    return RetainedCheckpoints(newest, tuple(iterations), missing[0] if missing else None)


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


def adopting_nodes(nodes: Mapping[str, NodeInventory]) -> dict[str, str]:
    """Returns, by absent node, the present node that adopts its parts: one with the newest copy."""
    holders: dict[str, list[str]] = {}
    for node in sorted(nodes):
        for owner, parts in nodes[node].copies.items():
            if owner not in nodes and parts:
                holders.setdefault(owner, []).append(node)
    return {
        owner: max(nodes_with_copies, key=lambda node: _newest(nodes[node].copies[owner]))
        for owner, nodes_with_copies in holders.items()
    }


def to_fetch(
    node: str, needed: Mapping[int, Collection[str]], nodes: Mapping[str, NodeInventory], sizes: Mapping[str, int]
) -> list[Fetch]:
    """Returns the fetches of a node for its ranks, in a fixed order.

    An operator with identical copies on several nodes is fetched from one that has all of it, unless it is local.

    Args:
        node: name of the node.
        needed: by iteration of a snapshot, the operators that the node's ranks load.
        nodes: inventories of all nodes.
        sizes: by operator, its number of parameters.
    """
    adopted = adopting_nodes(nodes)
    parts = {owner: (owner, nodes[owner].own) for owner in nodes}
    parts |= {owner: (holder, nodes[holder].copies[owner]) for owner, holder in adopted.items()}
    local = {owner for owner, (holder, _) in parts.items() if holder == node}
    fetches: list[Fetch] = []
    for iteration, names in sorted(needed.items()):
        parts_of_snapshot = {
            owner: part for owner, (_, own) in parts.items() for part in own if part.iteration == iteration
        }
        fetched: set[str] = set()  # operators with identical copies
        for owner in sorted(parts_of_snapshot, key=lambda owner: (owner not in local, owner)):
            part, operators = parts_of_snapshot[owner], {}
            for name in sorted(part.details.keys() & names):
                if name not in part.replica_counts:
                    operators[name] = part.details[name]
                elif name not in fetched and part.has_all(name, sizes[name]):
                    fetched.add(name)
                    operators[name] = part.details[name]
            if operators and owner not in local:
                fetches.append(Fetch(iteration, owner, parts[owner][0], operators))
    return fetches


def _newest(parts: Iterable[Summary]) -> int:
    return max(part.iteration for part in parts)
