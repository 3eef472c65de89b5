"""Defines the policy interface: a pure function from an iteration to a plan, and its four components.

:class:`Policy` has the plan and the values that it depends on. Its components have all other methods. A policy
overrides a component only if it differs from the default, which suits a policy that saves the full model:

* :class:`StorageSchedule`: the part of each snapshot that is also written to storage.
* :class:`SnapshotSchedule`: the distance between snapshots, and windows of them.
* :class:`PolicyReport`: values and texts for users.
* :class:`RecoveryResponse`: the response to a recovery.

A component has no state of its own. It reads and changes the policy's state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from moc.policy.errors import PolicyError
from moc.policy.interval import Interval
from moc.policy.plan import Capability, Load, SnapshotPlan, SnapshotSizer
from moc.policy.token_ledger import CapacityBoost
from moc.state.operators import Detail, Operator


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
        operators: all operators of the model, in model order (:func:`moc.state.shape.model_operators`).
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

    def plan(self, iteration: int, load: Load | None = None, again: bool = False) -> SnapshotPlan | None:
        """Plans the snapshot after ``iteration`` iterations if it is also stored; changes nothing.

        The run calls this method for these snapshots, and :meth:`Policy.plan` for all others.

        Args:
            iteration: as in :meth:`Policy.plan`.
            load: as in :meth:`Policy.plan`.
            again: storage lacks a snapshot that was due earlier, so one is due now, whatever the interval.
        """
        plan = self.policy.plan(iteration, load)
        is_owed = plan is None and again and Capability.WINDOWS not in self.policy.requires
        return full_plan(self.policy, iteration) if is_owed else plan

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
    def iterations_apart(self) -> int:
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
        elif detail is Detail.FULL or operator.place is not None and not is_exact:
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
