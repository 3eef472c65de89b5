"""Defines the policy interface: a pure function from an iteration to a snapshot plan, and its four components.

:class:`Policy` has the plan and the values that it depends on. Its components have all other methods. A policy
overrides a component only if it differs from the default, which suits a policy that saves the full model:

* :class:`StorageSchedule`: the part of each snapshot that is also written to storage.
* :class:`SnapshotSchedule`: the distance between snapshots, and windows of them.
* :class:`PolicyReport`: values and texts for users.
* :class:`RecoveryResponse`: the response to a recovery.

A component has no state of its own. It reads and changes the policy's state.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from moc.policy.errors import PolicyError
from moc.policy.interval import Interval
from moc.policy.token_ledger import CapacityBoost
from moc.state.operators import Detail, Operator

Load = Mapping[int, Sequence[int]]
"""Tokens given to each expert since training began, by global layer number."""


class SnapshotSizer(Protocol):
    """Sizes of snapshots by the sharding rules; calls are collective.

    Attributes:
        nodes: node of each rank.
        replicas: other nodes that keep a copy of each node's snapshots; 0 without peers.
    """

    nodes: tuple[int, ...]
    replicas: int

    def __call__(self, operators: Mapping[str, Detail]) -> int:
        """Returns the bytes of the rank that saves the most of ``operators``, each at its detail."""
        ...

    def by_rank(self, plans: Mapping[str, Mapping[str, Detail]]) -> dict[str, dict[int, int]]:
        """Returns the bytes of each rank with any, by plan; one collective call for all plans."""
        ...


@dataclass(frozen=True)
class SnapshotPlan:
    """Part of the model that a snapshot saves; identical on every rank, and independent of the sharding rule.

    Attributes:
        iteration: iterations completed when the snapshot is taken.
        policy: name of the policy that made the plan.
        operators: detail by operator name; in model order, read-only.
        complete: every operator is saved in full, so this snapshot is enough to recover.
        since: iteration of the first snapshot of its window; its own iteration outside of a longer window.
        needs: iteration of the oldest snapshot that it depends on; None for ``since``.
        remote: operators that other nodes' memory receives copies of; None for all.
        compared: operators saved in full together with their gradients. Applied to the previous state, these must lead
            to the saved state.

    Raises:
        ValueError: the plan is empty, or ``remote`` has something that the plan does not save.
    """

    iteration: int
    policy: str
    operators: Mapping[str, Detail] = field(hash=False)
    complete: bool
    since: int | None = None
    needs: int | None = None
    remote: Mapping[str, Detail] | None = field(default=None, hash=False)
    compared: frozenset[str] = frozenset()

    def __post_init__(self):
        if self.remote is not None:
            if unsaved := [name for name, detail in self.remote.items() if self.operators.get(name) is not detail]:
                raise PolicyError(
                    f"policy {self.policy} plans copies of {min(unsaved)}, which it does not save. Fix: plan to save "
                    "it, too, or not to copy it",
                    code="policy-plan-invalid",
                )
            object.__setattr__(self, "remote", MappingProxyType(dict(self.remote)))
        if not self.operators:
            raise PolicyError(
                f"policy {self.policy} plans an empty snapshot for iteration {self.iteration}. Fix: return None from "
                "its plan() where there is nothing to save",
                code="policy-plan-invalid",
            )
        object.__setattr__(self, "operators", MappingProxyType(dict(self.operators)))
        if self.since is None:
            object.__setattr__(self, "since", self.iteration)

    def operators_at(self, detail: Detail) -> tuple[str, ...]:
        """Returns the names of the operators that are saved at a detail, in model order."""
        return tuple(name for name, planned in self.operators.items() if planned is detail)

    def without(self, detail: Detail) -> SnapshotPlan:
        """Returns this plan without the operators that it saves at a detail."""
        operators = {name: planned for name, planned in self.operators.items() if planned is not detail}
        remote = self.remote and {name: operators[name] for name in self.remote if name in operators}
        return dataclasses.replace(self, operators=operators, remote=remote)

    @property
    def remote_plan(self) -> SnapshotPlan:
        """The part that other nodes' memory receives copies of."""
        if self.remote is None:
            return self
        complete = self.complete and self.remote == self.operators
        return dataclasses.replace(self, operators=self.remote, complete=complete, remote=None)

    @property
    def ends_window(self) -> bool:
        """Whether no operator awaits a full save; otherwise this snapshot cannot supersede earlier ones."""
        return Detail.COMPUTE not in self.operators.values()

    @property
    def supersedes(self) -> int | None:
        """The iteration before which snapshots are obsolete once this one is durable; None if none are."""
        if not self.ends_window:
            return None
        return self.since if self.needs is None else self.needs

    @property
    def details(self) -> tuple[Detail, ...]:
        """The details in this plan, in the order of :class:`~moc.state.operators.Detail`."""
        return tuple(detail for detail in Detail if detail in self.operators.values())


class Capability(Enum):
    """A capability of a run that a policy may require."""

    OLDER_EXPERTS = "experts may be restored to an older state than the rest; otherwise a resumed run is exact"
    WINDOWS = "a run resumes from several snapshots together"
    REPLAY = "resuming may replay iterations with some operators frozen"
    TOKEN_COUNTS = "the tokens of each expert are counted"
    GATING_PROBABILITIES = "the gating probabilities of each expert are summed"
    GRADIENTS = "snapshots may have gradients in place of state"
    BACKGROUND_UPDATES = "a background process applies chains of gradients in memory (MoEtion, section 5.2)"
    BUBBLES = "snapshots are copied in the pipeline's bubbles first, and bubbles are timed"
    LIVE_EXPERTS = "survivors keep live experts after a loss of others"


@dataclass(frozen=True)
class Policy(ABC):
    """Decides which state is saved, and when.

    A policy is a frozen dataclass; its settings are further fields, with defaults. Every rank uses its own copy,
    without communication. So results depend only on fields, arguments and values that policy and interval have
    received, which are equal on all ranks. Clocks, random numbers and ranks are not allowed.

    Queries such as :meth:`plan` change nothing; methods that receive or record values do. :meth:`state_dict` returns
    these values. It is stored with every snapshot, since with a tuned interval the number of past snapshots does not
    follow from the iteration.

    Attributes:
        operators: all operators of the model, in model order.
        interval: when a snapshot is due.
        name: name of the policy; set by :func:`moc.policy.registry.policy`.
        requires: capabilities that a run needs for this policy; set by :func:`moc.policy.registry.policy`, and extended
            by :func:`add_requirements` with those that follow from settings.
    """

    operators: Sequence[Operator]
    interval: Interval
    name: ClassVar[str]
    requires: ClassVar[frozenset[Capability]] = frozenset()

    @abstractmethod
    def plan(self, iteration: int, load: Load | None = None) -> SnapshotPlan | None:
        """Plans the snapshot after ``iteration`` iterations; None if nothing is to be saved.  Changes nothing.

        Args:
            iteration: number of completed iterations.
            load: tokens since training began, by layer and expert; None, here and below, if tokens are not counted.
        """

    def on_sizes(self, busiest: SnapshotSizer) -> None:  # noqa: B027
        """Receives the sizes of snapshots; called once, before training, on all ranks.

        Args:
            busiest: returns the bytes of the rank that saves the most of a plan's operators, and of each rank.

        Raises:
            ValueError: settings do not fit these sizes; the message has the remedy.
        """

    def on_routing(self, probabilities: Mapping[int, Sequence[float]]) -> None:  # noqa: B027
        """Receives the gating probabilities; called after every iteration, before :meth:`plan`.

        Args:
            probabilities: sum over the tokens given to an expert in this iteration, by layer and expert.
        """

    def on_snapshot(self, plan: SnapshotPlan, load: Load | None = None) -> None:  # noqa: B027
        """Records that a snapshot of this plan has begun; called before :meth:`state_dict` is stored with it.

        The plan is from :meth:`plan`, :meth:`StorageSchedule.plan` or :func:`full_plan`.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns the received values in JSON-compatible form; the interval keeps its own state."""
        return {}

    def loading(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Decodes a :meth:`state_dict`, also from JSON, and changes nothing; returns the function that restores it.

        The model must be the same, settings may differ.

        Raises:
            ValueError: the state is not from :meth:`state_dict`.
        """
        return lambda: None

    @property
    def storage(self) -> StorageSchedule:
        """Decides which part of a snapshot is also written to storage; by default, all of it."""
        return StorageSchedule(self)

    @property
    def schedule(self) -> SnapshotSchedule:
        """Distance between snapshots, and windows; by default, by the interval, and without windows."""
        return SnapshotSchedule(self)

    @property
    def report(self) -> PolicyReport:
        """Values and texts for users; by default none."""
        return PolicyReport(self)

    @property
    def recovery(self) -> RecoveryResponse:
        """Response to a recovery; by default none."""
        return RecoveryResponse(self)


@dataclass(frozen=True)
class StorageSchedule:
    """Decides which part of a snapshot is also written to storage, and records the writes.

    Storage receives snapshots at its own speed, and some writes fail. So the run decides which snapshots are written.
    Without a memory tier, all are.
    """

    policy: Policy

    @property
    def cycle(self) -> int | None:
        """Maximum number of persisted snapshots (or windows) until storage has a new version of every operator.

        None if there is no maximum, because experts are selected only by their tokens.
        """
        return 1

    def plan(self, iteration: int, load: Load | None = None, is_overdue: bool = False) -> SnapshotPlan | None:
        """Plans the snapshot after ``iteration`` iterations if it is also stored; changes nothing.

        The run calls this method for these snapshots, and :meth:`Policy.plan` for all others.

        Args:
            iteration: as in :meth:`Policy.plan`.
            load: as in :meth:`Policy.plan`.
            is_overdue: storage lacks a snapshot that was due earlier, so one is due now, whatever the interval.
        """
        plan = self.policy.plan(iteration, load)
        saves_overdue = plan is None and is_overdue and Capability.WINDOWS not in self.policy.requires
        return full_plan(self.policy, iteration) if saves_overdue else plan

    def part_of(self, plan: SnapshotPlan) -> SnapshotPlan:
        """Returns the part of a snapshot in memory that is persisted; by default, all of it.

        Not used at the end of a run, where :func:`full_plan` is persisted unchanged.
        """
        return plan

    def needs(self, plan: SnapshotPlan) -> bool:
        """Returns whether a snapshot must be persisted though none is due; called before :meth:`Policy.on_snapshot`."""
        return False

    def on_write_begun(self, plan: SnapshotPlan) -> None:
        """Records that a write of a plan from :meth:`part_of` starts; called after :meth:`Policy.on_snapshot`."""

    def on_write_ended(self, plan: SnapshotPlan, committed: bool) -> None:
        """Records that the write of a plan given to :meth:`on_write_begun` was committed, or failed."""

    def on_full_snapshot_lost(self) -> None:
        """Records that the first checkpoint for storage was not written: storage needs another one."""

    def on_inventory(self, persisted: Mapping[str, int]) -> None:
        """Records the contents of storage when a run resumes; called after :meth:`RecoveryResponse.on_resume`.

        Args:
            persisted: iteration of the newest full save by operator; absent operators have none.
        """


@dataclass(frozen=True)
class SnapshotSchedule:
    """Distance between snapshots, and the windows of a policy that resumes from several snapshots together."""

    policy: Policy

    @property
    def snapshot_interval(self) -> int:
        """Iterations between snapshots, if known; by default :attr:`Interval.iterations`."""
        return max(1, self.policy.interval.iterations)

    @property
    def window_length(self) -> int:
        """Number of snapshots in the current or last window, which a run can resume from."""
        return 1

    def plan_as_due(self, iteration: int, load: Load | None = None) -> SnapshotPlan:
        """Plans the snapshot after ``iteration`` iterations as if one were due; changes nothing."""
        return self.policy.plan(iteration, load) or full_plan(self.policy, iteration)

    def current_window(self, iteration: int) -> Sequence[SnapshotPlan]:
        """Returns the plans of the current window's snapshots up to and including the last completed iteration.

        Empty if no such snapshot has begun, or if every snapshot is its own window.
        """
        return ()

    def restart_window(self) -> None:
        """Records that the current window lacks a snapshot: the next snapshot begins a new window."""


@dataclass(frozen=True)
class PolicyReport:
    """Values and texts of a policy for users; nothing depends on them."""

    policy: Policy

    def remarks(self) -> Iterator[str]:
        """Yields remarks for users, such as settings without effect; printed once before training."""
        return iter(())

    def gauges(self) -> dict[str, float]:
        """Returns the values that change during a run and are worth plotting, by name."""
        return {}

    def chosen(self) -> dict[str, float]:
        """Returns the :meth:`gauges` that the policy has chosen, explained by :meth:`reason`."""
        return self.gauges()

    def reason(self) -> str | None:
        """Returns why the policy chose :meth:`chosen`; None if it chose nothing."""
        return None

    def fault_cost(self, train_iters: int, in_memory: bool, in_storage: bool) -> tuple[str, dict] | None:
        """Returns the expected cost of a fault, as text and as event fields; None if there is none or it is unknown.

        Args:
            train_iters: iterations of the training, whose tokens the lost proportion refers to.
            in_memory: a memory tier has every snapshot.
            in_storage: snapshots are also persisted.
        """
        return None

    def at_risk(self, plt: float, train_iters: int) -> tuple[str, dict] | None:
        """Returns a warning, as text and as event fields, if the next fault would lose too many tokens; otherwise None.

        Args:
            plt: tokens that faults have lost so far, as a proportion of the tokens of the complete training.
            train_iters: iterations of the complete training.
        """
        return None


@dataclass(frozen=True)
class RecoveryResponse:
    """Response of a policy to a recovery."""

    policy: Policy

    @property
    def capacity_boost(self) -> CapacityBoost | None:
        """Capacity boost of experts that compensate tokens lost to a recovery; by default none."""
        return None

    def on_resume(self, in_memory: bool, in_storage: bool) -> None:
        """Records which snapshots exist when a run resumes; called after :meth:`Policy.loading`.

        Args:
            in_memory: the tier that makes snapshots durable, possibly storage itself, has everything that the run
                resumes with.
            in_storage: storage is enough to resume the run.
        """

    def on_recovery(self, plt: float) -> None:
        """Records the cost of a recovery: the increase of the proportion of lost tokens over the complete training."""


def add_requirements(policy: Policy, capabilities: Iterable[Capability]) -> None:
    """Adds capabilities that follow from a policy's settings; called in its ``__post_init__``."""
    object.__setattr__(policy, "requires", policy.requires.union(capabilities))


def recovers_exactly(policy: Policy) -> bool:
    """Returns whether a run resumed from a policy's snapshots is bit-identical to one without the failure."""
    return Capability.OLDER_EXPERTS not in policy.requires


def full_plan(policy: Policy, iteration: int) -> SnapshotPlan:
    """Returns a plan of the full model, due or not: for the last iteration, and for a job that is asked to stop."""
    details = {operator.name: Detail.FULL for operator in policy.operators}
    return SnapshotPlan(iteration, policy.name, details, complete=True)


def check_plan(policy: Policy, plan: SnapshotPlan) -> None:
    """Refuses a snapshot that no recovery could use.

    A recovery uses:

    * by default, one snapshot with everything in full;
    * if the policy requires ``REPLAY``, a window of ``FULL`` and ``COMPUTE``;
    * if it is exact and saves gradients, chains of ``FULL`` and ``GRAD``;
    * if it is not exact, one snapshot for dense operators, and others for experts.

    Raises:
        ValueError: the plan has other details or operators; the message names an operator.
    """
    unknown = plan.operators.keys() - {operator.name for operator in policy.operators}
    unknown |= {name for name, detail in plan.operators.items() if not isinstance(detail, Detail)}
    if unknown:
        raise PolicyError(
            f"policy {policy.name} plans {min(unknown)} at iteration {plan.iteration}, which is no operator of this "
            "model or has no detail. Fix: take the names of its field operators, and a moc.Detail for each",
            code="policy-plan-invalid",
        )
    is_exact = recovers_exactly(policy)
    for operator in policy.operators:
        detail = plan.operators.get(operator.name)
        if Capability.REPLAY in policy.requires:
            if detail in (Detail.FULL, Detail.COMPUTE, None):
                continue
            needs, remedy = "only full and compute can be replayed", "plan one of them"
        elif detail is Detail.FULL or operator.expert_id is not None and not is_exact:
            continue
        elif is_exact and Capability.GRADIENTS in policy.requires:
            if detail is Detail.GRAD:
                continue
            needs, remedy = "a chain is of full saves and gradients", "plan one of them"
        elif is_exact:
            needs, remedy = (
                "an exact policy that does not replay saves each operator in full",
                "do so, or drop exact",
            )
        else:
            needs, remedy = "all state but experts is restored from one snapshot", "save it in full"
        raise PolicyError(
            f"policy {policy.name} plans {operator.name} {'not at all' if detail is None else f'as {detail.value}'} at "
            f"iteration {plan.iteration}, but {needs}. Fix: {remedy}",
            code="policy-plan-invalid",
        )


@dataclass(frozen=True)
class Full(Policy):
    """Saves every operator in full whenever the interval is due.

    Megatron-DeepSpeed's blocking save, CheckFreq (Mohan et al., FAST 2021) and Gemini (Wang et al., SOSP 2023) all save
    this. They differ in tier and in blocking, which no policy decides.
    """

    def plan(self, iteration: int, load: Load | None = None) -> SnapshotPlan | None:
        """Returns the full model if a snapshot is due, regardless of load."""
        return full_plan(self, iteration) if self.interval.is_due(iteration) else None
