"""Base of policies whose snapshots have all dense operators, and only some of the experts."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

from moc.files import decode
from moc.files.decode import Count, StateError
from moc.policy.errors import PolicyError
from moc.policy.expert_selection import ExpertId
from moc.policy.interface import (
    Capability,
    Load,
    Policy,
    RecoveryResponse,
    SnapshotPlan,
    SnapshotSchedule,
    StorageSchedule,
    full_plan,
)
from moc.state.operators import Detail, Operator


def experts_by_layer(operators: Iterable[Operator]) -> dict[int, int]:
    """Returns the number of experts by layer, ascending; only layers with experts."""
    return dict(
        sorted(Counter(operator.expert_id[0] for operator in operators if operator.expert_id is not None).items())
    )


def check_tables(tables: Iterable[Mapping[int, Any]], num_experts: Mapping[int, int], of: str) -> None:
    """Checks that saved values by layer, or by layer and expert, include all layers and experts, or none.

    Raises:
        ValueError: a layer or an expert is missing, or there are too many.
    """
    for table in filter(None, tables):
        rows = {
            layer: len(row) if isinstance(row, Sequence) else num_experts.get(layer) for layer, row in table.items()
        }
        if rows != num_experts:
            raise StateError(
                f"this is no state of {of} of this model (its experts are others). Fix: start without it",
            )


ExpertTable = dict[Count, list[Count]]
"""Integers by layer and expert."""


class SavedVersions(NamedTuple):
    """Last save of each expert to a tier, by layer: tokens given until then, iteration, and iteration in full."""

    tokens: ExpertTable
    at: ExpertTable
    bases: ExpertTable

    def record(
        self, numbers: Mapping[int, int], saved: Mapping[ExpertId, Detail], iteration: int, tokens: Load
    ) -> None:
        """Records a save of experts.

        Args:
            numbers: experts of each layer.
            saved: the saved experts, each at its detail; without ``FULL``, an expert's base stays the same.
            iteration: iteration of the snapshot.
            tokens: tokens given until then, by layer and expert.
        """
        for layer, number in numbers.items():
            for table in self:
                table.setdefault(layer, [0] * number)
        for (layer, expert), detail in saved.items():
            self.at[layer][expert] = iteration
            if layer in tokens:
                self.tokens[layer][expert] = tokens[layer][expert]
            if detail is Detail.FULL:
                self.bases[layer][expert] = iteration

    def copy(self) -> SavedVersions:
        """Returns an independent copy."""
        return SavedVersions(*map(_copy_table, self))


class _PendingWrite(NamedTuple):
    """A snapshot on its way to storage: its experts, and the tokens given to all experts when it was taken."""

    experts: Mapping[ExpertId, Detail]
    tokens: ExpertTable


@dataclass
class PartialState:
    """State of a partial policy; each further field is a :data:`TokenTable` or a plain value, with a default.

    Attributes:
        based: memory, or the only tier, has every expert.
        stored: storage has every expert, or a snapshot with every expert is on its way there.
        saved: tokens given to each expert until its last save to memory, or to the only tier, by layer.
        saved_at: iteration of that save.
        persisted: as ``saved``, for the version that is committed in storage.
        persisted_at: as ``saved_at``, for the same version.
    """

    of: ClassVar[str] = "partial checkpoints"

    based: bool = False
    stored: bool = False
    saved: ExpertTable = field(default_factory=dict)
    saved_at: ExpertTable = field(default_factory=dict)
    persisted: ExpertTable = field(default_factory=dict)
    persisted_at: ExpertTable = field(default_factory=dict)

    @property
    def in_memory(self) -> SavedVersions:
        """Saves to memory, or to the only tier."""
        return SavedVersions(self.saved, self.saved_at, {})

    @property
    def in_storage(self) -> SavedVersions:
        """Saves committed in storage."""
        return SavedVersions(self.persisted, self.persisted_at, {})

    def record_resume(self, in_memory: bool, in_storage: bool) -> None:
        """Records that the run resumes, and whether each tier is complete."""
        self.based, self.stored = in_memory and in_storage, in_storage

    def state_dict(self) -> dict[str, Any]:
        """Returns all fields as JSON-compatible values; tables are copied."""
        tables = {name: value for name, value in decode.field_values(self).items() if isinstance(value, dict)}
        return decode.field_values(self) | {name: _copy_table(table) for name, table in tables.items()}

    @classmethod
    def read(cls, state: Mapping[str, Any], num_experts: Mapping[int, int]) -> Self:
        """Restores a :meth:`state_dict`, directly or through JSON.

        Args:
            state: the state.
            num_experts: number of experts by layer; tables without any layer are complete, too.

        Raises:
            ValueError: the state belongs to another class or another model.
        """
        decoded = decode.convert_state(state, cls, cls.of, requires_every_field=True)
        check_tables(
            (value for value in decode.field_values(decoded).values() if isinstance(value, dict)), num_experts, cls.of
        )
        return decoded


@dataclass(frozen=True)
class PartialPolicy(Policy):
    """A policy whose first snapshot in each tier has all experts, and later ones only some.

    Attributes:
        state: state of the policy; stored with snapshots.
        pending_writes: snapshots on their way to storage, by iteration. Snapshots do not include them: a run that
            resumes reads the contents of storage (:meth:`PartialStorage.on_inventory`).
    """

    requires: ClassVar[frozenset[Capability]] = frozenset({Capability.OLDER_EXPERTS})

    state: PartialState = field(default_factory=PartialState, compare=False, kw_only=True)
    pending_writes: dict[int, _PendingWrite] = field(default_factory=dict, compare=False, kw_only=True, repr=False)

    def plan(self, iteration: int, load: Load | None = None) -> SnapshotPlan | None:
        """Returns all dense operators and the experts selected now; a full plan if no full snapshot exists yet.

        Raises:
            ValueError: the selection needs tokens, and they are not counted.
        """
        return self.plan_now(iteration, load, persists=False) if self.is_due(iteration) else None

    def is_due(self, iteration: int) -> bool:
        """Returns whether a snapshot is due."""
        return self.interval.is_due(iteration)

    def plan_now(self, iteration: int, load: Load | None, persists: bool) -> SnapshotPlan | None:
        """Plans a snapshot, due or not; a full one if no full snapshot exists yet."""
        if not self.state.based or not self.num_experts:
            return full_plan(self, iteration)
        return self.plan_partial(iteration, load, persists)

    @abstractmethod
    def plan_partial(self, iteration: int, load: Load | None, persists: bool) -> SnapshotPlan | None:
        """Plans the experts selected now, for storage if the snapshot ``persists``, otherwise for memory."""

    def on_snapshot(self, plan: SnapshotPlan, load: Load | None = None) -> None:
        self.state.based |= plan.complete
        self.state.in_memory.record(self.num_experts, self.experts_of_plan(plan), plan.iteration, load or {})

    def expected_in_storage(self) -> SavedVersions:
        """Returns the versions in storage if all outstanding writes succeed."""
        expected = self.state.in_storage.copy()
        expected.record(self.num_experts, {}, 0, {})
        for iteration, write in sorted(self.pending_writes.items()):
            expected.record(self.num_experts, write.experts, iteration, write.tokens)
        return expected

    @property
    def storage(self) -> StorageSchedule:
        return PartialStorage(self)

    @property
    def schedule(self) -> SnapshotSchedule:
        return PartialSchedule(self)

    @property
    def recovery(self) -> RecoveryResponse:
        return PartialRecovery(self)

    def state_dict(self) -> dict[str, Any]:
        return self.state.state_dict()

    def loading(self, state: Mapping[str, Any]) -> Callable[[], None]:
        decoded = self.state.read(state, self.num_experts)

        def load() -> None:
            self.pending_writes.clear()
            vars(self.state).update(decode.field_values(decoded))

        return load

    def experts_of_plan(self, plan: SnapshotPlan) -> dict[ExpertId, Detail]:
        """Returns the experts of a plan, each at its detail."""
        expert_ids = {name: self.expert_by_name[name] for name in plan.operators}
        return {expert_id: plan.operators[name] for name, expert_id in expert_ids.items() if expert_id is not None}

    @cached_property
    def expert_by_name(self) -> dict[str, ExpertId | None]:
        """Layer and number of each operator that is an expert; None for dense operators."""
        return {operator.name: operator.expert_id for operator in self.operators}

    @cached_property
    def num_experts(self) -> dict[int, int]:
        """Number of experts by layer, ascending; only layers with experts."""
        return experts_by_layer(self.operators)


@dataclass(frozen=True)
class PartialStorage(StorageSchedule):
    """Storage needs a full snapshot first; later ones have the experts that storage lacks most."""

    policy: PartialPolicy

    def plan(self, iteration: int, load: Load | None = None, is_overdue: bool = False) -> SnapshotPlan | None:
        """As :meth:`StorageSchedule.plan`: the selection depends on the versions in storage."""
        is_due = is_overdue or self.policy.is_due(iteration)
        return self.policy.plan_now(iteration, load, persists=True) if is_due else None

    def part_of(self, plan: SnapshotPlan) -> SnapshotPlan:
        """As :meth:`StorageSchedule.part_of`: all of it.

        Raises:
            ValueError: storage has no full checkpoint, which partial ones need.
        """
        if not self.policy.state.stored and not plan.complete:
            raise PolicyError(
                f"the partial snapshot of iteration {plan.iteration} cannot be used in storage, which does not hold "
                "all experts yet. Fix: save full_plan() at the first iteration that goes there",
                code="storage-lacks-experts",
            )
        return plan

    def needs(self, plan: SnapshotPlan) -> bool:
        """As :meth:`StorageSchedule.needs`: a full snapshot if storage lacks one, since partial ones depend on it."""
        return plan.complete and not self.policy.state.stored

    def on_write_begun(self, plan: SnapshotPlan) -> None:
        """As :meth:`StorageSchedule.on_write_begun`; called when the snapshot has just begun."""
        policy, state = self.policy, self.policy.state
        state.stored |= plan.complete
        policy.pending_writes[plan.iteration] = _PendingWrite(policy.experts_of_plan(plan), _copy_table(state.saved))

    def on_write_ended(self, plan: SnapshotPlan, committed: bool) -> None:
        """As :meth:`StorageSchedule.on_write_ended`: after a failed write, storage keeps its versions."""
        policy = self.policy
        write = policy.pending_writes.pop(plan.iteration, None)
        if committed and write is not None:
            policy.state.in_storage.record(policy.num_experts, write.experts, plan.iteration, write.tokens)

    def on_full_snapshot_lost(self) -> None:
        """As :meth:`StorageSchedule.on_full_snapshot_lost`: the next snapshot is full."""
        self.policy.state.based = self.policy.state.stored = False

    def on_inventory(self, persisted: Mapping[str, int]) -> None:
        """As :meth:`StorageSchedule.on_inventory`.

        A version in no table counts with the tokens of the newest known version before it.
        """
        policy = self.policy
        policy.pending_writes.clear()
        stored, memory = policy.state.in_storage, policy.state.in_memory
        for saves in (stored, memory):
            saves.record(policy.num_experts, {}, 0, {})
        for name, expert_id in policy.expert_by_name.items():
            if expert_id is None:
                continue
            (layer, expert), at = expert_id, persisted.get(name, 0)
            tokens_by_iteration = {saves.at[layer][expert]: saves.tokens[layer][expert] for saves in (memory, stored)}
            earlier = [iteration for iteration in tokens_by_iteration if iteration <= at]
            stored.tokens[layer][expert] = tokens_by_iteration[max(earlier)] if earlier else 0
            stored.at[layer][expert] = at


@dataclass(frozen=True)
class PartialSchedule(SnapshotSchedule):
    """Snapshots are apart by the interval."""

    policy: PartialPolicy

    def plan_as_due(self, iteration: int, load: Load | None = None) -> SnapshotPlan:
        return self.policy.plan_now(iteration, load, persists=False) or full_plan(self.policy, iteration)


@dataclass(frozen=True)
class PartialRecovery(RecoveryResponse):
    """After a recovery, the next snapshot is full if a tier lacks an expert."""

    policy: PartialPolicy

    def on_resume(self, in_memory: bool, in_storage: bool) -> None:
        """As :meth:`RecoveryResponse.on_resume`: if either tier lacks an expert, the next snapshot is full."""
        self.policy.pending_writes.clear()
        self.policy.state.record_resume(in_memory, in_storage)


def _copy_table(table: Mapping) -> dict:
    return {key: copy(row) for key, row in table.items()}
