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
from moc.policy.plan import Capability, Load, Policy, SnapshotPlan
from moc.state.detail import Detail
from moc.state.operators import Operator


def experts_by_layer(operators: Iterable[Operator]) -> dict[int, int]:
    """Returns the number of experts by layer, ascending; only layers with experts."""
    return dict(sorted(Counter(one.place[0] for one in operators if one.place is not None).items()))


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
        tables = {name: value for name, value in decode.values_of(self).items() if isinstance(value, dict)}
        return decode.values_of(self) | {name: _copy_table(table) for name, table in tables.items()}

    @classmethod
    def read(cls, state: Mapping[str, Any], num_experts: Mapping[int, int]) -> Self:
        """Restores a :meth:`state_dict`, directly or through JSON.

        Args:
            state: the state.
            num_experts: number of experts by layer; tables without any layer are complete, too.

        Raises:
            ValueError: the state belongs to another class or another model.
        """
        decoded = decode.state(state, cls, cls.of, every_field=True)
        check_tables(
            (value for value in decode.values_of(decoded).values() if isinstance(value, dict)), num_experts, cls.of
        )
        return decoded


@dataclass(frozen=True)
class PartialPolicy(Policy):
    """A policy whose first snapshot in each tier has all experts, and later ones only some.

    Attributes:
        state: state of the policy; stored with snapshots.
        writes: snapshots on their way to storage, by iteration. Snapshots do not include them: a run that resumes reads
            the contents of storage (:meth:`on_inventory`).
    """

    _always_requires: ClassVar[frozenset[Capability]] = frozenset({Capability.OLDER_EXPERTS})

    state: PartialState = field(default_factory=PartialState, compare=False, kw_only=True)
    pending_writes: dict[int, _PendingWrite] = field(default_factory=dict, compare=False, kw_only=True, repr=False)

    def plan(self, iteration: int, load: Load | None = None) -> SnapshotPlan | None:
        """Returns all dense operators and the experts selected now; a full plan if no full snapshot exists yet.

        Raises:
            ValueError: the selection needs tokens, and they are not counted.
        """
        return self._plan(iteration, load, persists=False) if self._is_due(iteration) else None

    def plan_for_storage(self, iteration: int, load: Load | None = None, again: bool = False) -> SnapshotPlan | None:
        """As :meth:`Policy.plan_for_storage`: the selection depends on the versions in storage."""
        return self._plan(iteration, load, persists=True) if again or self._is_due(iteration) else None

    def plan_as_due(self, iteration: int, load: Load | None = None) -> SnapshotPlan:
        """As :meth:`Policy.plan_as_due`."""
        return self._plan(iteration, load, persists=False) or self.everything(iteration)

    def _is_due(self, iteration: int) -> bool:
        """Returns whether a snapshot is due."""
        return self.interval.is_due(iteration)

    def _plan(self, iteration: int, load: Load | None, persists: bool) -> SnapshotPlan | None:
        if not self.state.based or not self.num_experts:
            return self.everything(iteration)
        return self.plan_partial(iteration, load, persists)

    @abstractmethod
    def plan_partial(self, iteration: int, load: Load | None, persists: bool) -> SnapshotPlan | None:
        """Plans the experts selected now, as :meth:`plan`, or if ``persists`` as :meth:`plan_for_storage`."""

    def on_snapshot(self, plan: SnapshotPlan, load: Load | None = None) -> None:
        """As :meth:`Policy.on_snapshot`."""
        self.state.based |= plan.complete
        self.state.in_memory.record(self.num_experts, self._experts_of_plan(plan), plan.iteration, load or {})

    def on_stored(self, plan: SnapshotPlan) -> None:
        """As :meth:`Policy.on_stored`; called when the snapshot has just begun."""
        self.state.stored |= plan.complete
        self.pending_writes[plan.iteration] = _PendingWrite(self._experts_of_plan(plan), _copy_table(self.state.saved))

    def on_persisted(self, plan: SnapshotPlan, published: bool) -> None:
        """As :meth:`Policy.on_persisted`: after a failed write, storage keeps its versions."""
        write = self.pending_writes.pop(plan.iteration, None)
        if published and write is not None:
            self.state.in_storage.record(self.num_experts, write.experts, plan.iteration, write.tokens)

    def on_inventory(self, persisted: Mapping[str, int]) -> None:
        """As :meth:`Policy.on_inventory`.

        A version in no table counts with the tokens of the newest known version before it.
        """
        self.pending_writes.clear()
        stored, memory = self.state.in_storage, self.state.in_memory
        for saves in (stored, memory):
            saves.record(self.num_experts, {}, 0, {})
        for name, place in self._expert_by_name.items():
            if place is None:
                continue
            (layer, expert), at = place, persisted.get(name, 0)
            known = {saves.at[layer][expert]: saves.tokens[layer][expert] for saves in (memory, stored)}
            earlier = [iteration for iteration in known if iteration <= at]
            stored.tokens[layer][expert] = known[max(earlier)] if earlier else 0
            stored.at[layer][expert] = at

    def expected_in_storage(self) -> SavedVersions:
        """Returns the versions in storage if all outstanding writes succeed."""
        found = self.state.in_storage.copy()
        found.record(self.num_experts, {}, 0, {})
        for iteration, write in sorted(self.pending_writes.items()):
            found.record(self.num_experts, write.experts, iteration, write.tokens)
        return found

    def stores(self, plan: SnapshotPlan) -> bool:
        """As :meth:`Policy.stores`: a full snapshot if storage lacks one, since partial ones depend on it."""
        return plan.complete and not self.state.stored

    def for_storage(self, plan: SnapshotPlan) -> SnapshotPlan:
        """As :meth:`Policy.for_storage`: all of it.

        Raises:
            ValueError: storage has no full checkpoint, which partial ones need.
        """
        if not self.state.stored and not plan.complete:
            raise PolicyError(
                f"the partial snapshot of iteration {plan.iteration} cannot be used in storage, which does not hold "
                "all experts yet. Fix: save everything() at the first iteration that goes there",
                code="storage-lacks-experts",
            )
        return plan

    def on_resume(self, in_memory: bool, in_storage: bool) -> None:
        """As :meth:`Policy.on_resume`: if either tier lacks an expert, the next snapshot is full."""
        self.pending_writes.clear()
        self.state.record_resume(in_memory, in_storage)

    def storage_lost(self) -> None:
        """As :meth:`Policy.storage_lost`: partial checkpoints need a full one, so the next snapshot is full."""
        self.state.based = self.state.stored = False

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`Policy.state_dict`."""
        return self.state.state_dict()

    def loading(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """As :meth:`Policy.loading`."""
        decoded = self.state.read(state, self.num_experts)

        def load() -> None:
            self.pending_writes.clear()
            vars(self.state).update(decode.values_of(decoded))

        return load

    def _experts_of_plan(self, plan: SnapshotPlan) -> dict[ExpertId, Detail]:
        """Returns the experts of a plan, each at its detail."""
        places = {name: self._expert_by_name[name] for name in plan.operators}
        return {place: plan.operators[name] for name, place in places.items() if place is not None}

    @cached_property
    def _expert_by_name(self) -> dict[str, ExpertId | None]:
        return {one.name: one.place for one in self.operators}

    @cached_property
    def num_experts(self) -> dict[int, int]:
        """Number of experts by layer, ascending; only layers with experts."""
        return experts_by_layer(self.operators)


def _copy_table(table: Mapping) -> dict:
    return {key: copy(row) for key, row in table.items()}
