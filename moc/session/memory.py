"""Computes the windows and the files of experts that a policy will need host memory for."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from moc.policy import Capability, Load, Policy, SnapshotPlan, full_plan
from moc.policy.partial import experts_by_layer
from moc.recovery.expert_versions import max_retained, slot_of
from moc.recovery.sources import MEMORY, AvailableCheckpoint
from moc.snapshot.contents import Contents
from moc.state.operators import Detail, operator_of
from moc.store.header import FileLayout

_SETTLED = 3  # earlier windows: the current one, and the first one of its kind
_PLANS = 16  # until the number of retained experts is constant
_PLANS_OF_CHAINS = 64  # chains of gradients grow for longer
_TOKENS = 1 << 20  # of the busiest expert
_POPULARITIES: tuple[Callable[[int], float], ...] = (
    lambda expert: _TOKENS,
    lambda expert: _TOKENS / (1 + expert),
)
"""Uniform popularity of experts, and Zipf's law: the fewer experts are busy, the longer chains of gradients become."""


class SnapshotWindow(NamedTuple):
    """Snapshots of a policy that a run resumes from together.

    Attributes:
        length: number of snapshots.
        kept: maximum number of snapshots that recovery needs.
        snapshot: bytes of this rank's largest share of a snapshot; None if each is a full snapshot.
    """

    length: int = 1
    kept: int = 1
    snapshot: int | None = None


def next_window(policy: Policy, contents: Contents, iteration: int) -> SnapshotWindow:
    """Returns the window that a policy would plan after the current ones; changes nothing.

    Args:
        policy: policy with windows.
        contents: provides this rank's shares.
        iteration: iterations completed.
    """
    trial, windows, in_memory, max_kept = trial_of(policy), 0, [], 1
    plans = []
    for after in range(iteration + 1, iteration + 3 + 3 * len(policy.operators)):
        if (plan := trial.plan(after)) is None:
            break
        windows += plan.since == plan.iteration
        if windows > _SETTLED:
            break
        trial.on_snapshot(plan)
        in_memory = [
            number for number in [*in_memory, plan.iteration] if plan.supersedes is None or number >= plan.supersedes
        ]
        if windows == _SETTLED:
            plans.append(plan)
            max_kept = max(max_kept, len(in_memory))
    shares = (contents.with_gradients(plan.operators, plan.compared) for plan in plans if not plan.complete)
    return SnapshotWindow(max(1, len(plans)), max_kept, max((share.layout.nbytes for share in shares), default=None))


class RunProgress(NamedTuple):
    """Progress of a run: iterations completed, and tokens of each expert by layer, None if they are not counted."""

    iteration: int = 0
    load: Load | None = None


def plans_ahead(
    policy: Policy, popularity: Callable[[int], float], progress: RunProgress
) -> Iterator[AvailableCheckpoint]:
    """Yields a full snapshot and the following snapshots of a policy; changes nothing.

    Args:
        policy: a policy without windows.
        popularity: returns the tokens of an expert in an iteration, by its number in its layer.
        progress: progress of the run before the first of these snapshots.
    """
    trial, passed = trial_of(policy), 0
    start = progress.load or {layer: [0] * count for layer, count in experts_by_layer(policy.operators).items()}
    yield _available(full_plan(trial, 0), 0)
    for number in range(1, _PLANS_OF_CHAINS if Capability.GRADIENTS in policy.requires else _PLANS):
        passed += trial.schedule.snapshot_interval
        load = {layer: [n + int(passed * popularity(e)) for e, n in enumerate(row)] for layer, row in start.items()}
        plan = trial.schedule.plan_as_due(progress.iteration + passed, load)
        trial.on_snapshot(plan, load)
        yield _available(plan, number)


def trial_of(policy: Policy) -> Policy:
    """Returns a copy of a policy with the same operators, for trial plans."""
    return copy.deepcopy(policy, {id(shared): shared for shared in (policy.operators, *policy.operators)})


def _available(plan: SnapshotPlan, number: int) -> AvailableCheckpoint:
    return AvailableCheckpoint(number, MEMORY, {name: detail.value for name, detail in plan.operators.items()})


def bytes_of_experts(contents: Contents, experts: Collection[str], gradients: bool) -> dict[str, dict[str, int]]:
    """Returns, by detail and expert, the bytes of a file with this rank's share of it; absent if it saves none."""
    sizes = {}
    for detail in (Detail.FULL, Detail.MASTER, Detail.MOMENTS, *[Detail.GRAD] * gradients):
        entries = defaultdict(list)
        for entry in contents.share(dict.fromkeys(experts, detail)).layout.entries:
            entries[operator_of(entry.name)].append(entry)
        sizes[detail.value] = {name: FileLayout(operator_entries).nbytes for name, operator_entries in entries.items()}
    return sizes


def retained_files(
    policy: Policy, ranks: Iterable[Mapping[str, Mapping[str, int]]], not_durable: int, progress: RunProgress
) -> dict[str, list[int]]:
    """Returns, by slot name, the sizes in bytes of the most files of experts that a node retains.

    If plans retain no expert, each expert is counted once, because the run may choose the number of experts later.
    Chain lengths depend on the tokens of experts, so the result is the maximum over several popularities.

    Args:
        policy: policy of the run.
        ranks: :func:`bytes_of_experts` of each rank of the node.
        not_durable: as in :func:`~moc.recovery.expert_versions.max_retained`.
        progress: as in :func:`plans_ahead`.
    """
    sizes: dict[str, Counter[str]] = defaultdict(Counter)
    for rank_sizes in ranks:
        for detail, by_expert in rank_sizes.items():
            sizes[detail].update(by_expert)
    experts = frozenset(sizes[Detail.FULL.value])
    if not experts:
        return {}
    numbers: Counter[Detail] = Counter()
    for popularity in _POPULARITIES[: 1 + (Capability.GRADIENTS in policy.requires)]:
        numbers |= Counter(max_retained(plans_ahead(policy, popularity, progress), experts, not_durable))
    numbers = numbers or Counter({Detail.FULL: len(experts)})
    return {slot_of(detail): [max(sizes[detail.value].values())] * number for detail, number in numbers.items()}
