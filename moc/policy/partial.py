"""What policies share whose snapshots hold all dense operators, and only some of the experts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Self

from moc.files import decode
from moc.files.decode import Count
from moc.policy.errors import PolicyError
from moc.policy.plan import Load, Policy, SnapshotPlan, check_tables, experts_by_layer

Table = dict[Count, list[Count]]
"""Integers by layer and expert."""


@dataclass
class PartialState:
    """What such a policy was told; each further field is a :data:`Table` or a plain value, with a default.

    Attributes:
        based: memory, or the only tier, holds every expert.
        stored: storage holds every expert.
    """

    of: ClassVar[str] = "partial checkpoints"

    based: bool = False
    stored: bool = False

    def resumed(self, in_memory: bool, in_storage: bool) -> None:
        """The run resumes, and both tiers are without gaps or not."""
        self.based, self.stored = in_memory and in_storage, in_storage

    def state_dict(self) -> dict[str, Any]:
        """All fields as JSON-compatible values, which later changes do not reach."""
        tables = {name: value for name, value in vars(self).items() if isinstance(value, dict)}
        return vars(self) | {name: {key: copy(row) for key, row in table.items()} for name, table in tables.items()}

    @classmethod
    def read(cls, state: Mapping[str, Any], num_experts: Mapping[int, int]) -> Self:
        """The inverse of :meth:`state_dict`, also after it was JSON.

        Args:
            state: the state.
            num_experts: number of experts by layer; tables without any layer are complete, too.

        Raises:
            ValueError: the state is of another class or of another model.
        """
        found = decode.state(state, cls, cls.of, every_field=True)
        check_tables((value for value in vars(found).values() if isinstance(value, dict)), num_experts, cls.of)
        return found


@dataclass(frozen=True)
class Partial(Policy):
    """A policy whose first snapshot, in each tier, has all experts, and later ones some of them.

    Attributes:
        told: what the policy was told; stored with snapshots.
    """

    exact: ClassVar[bool] = False

    told: PartialState = field(default_factory=PartialState, compare=False, kw_only=True)

    def plan(self, iteration: int, load: Load | None = None) -> SnapshotPlan | None:
        """All dense operators and the experts selected now; a full plan if no full snapshot exists yet.

        Raises:
            ValueError: the selection needs tokens, and they are not counted.
        """
        if not self.interval.due(iteration):
            return None
        if not self.told.based or not self.num_experts:
            return self.everything(iteration)
        return self.plan_partial(iteration, load)

    @abstractmethod
    def plan_partial(self, iteration: int, load: Load | None) -> SnapshotPlan | None:
        """As :meth:`plan`, of the experts selected now."""

    def on_snapshot(self, plan: SnapshotPlan, load: Load | None = None) -> None:
        """As :meth:`Policy.on_snapshot`."""
        self.told.based |= plan.complete

    def on_stored(self, plan: SnapshotPlan) -> None:
        """As :meth:`Policy.on_stored`; called when the snapshot has just begun."""
        self.told.stored |= plan.complete

    def stores(self, plan: SnapshotPlan) -> bool:
        """As :meth:`Policy.stores`: a full snapshot if storage lacks one, since partial ones depend on it."""
        return plan.complete and not self.told.stored

    def for_storage(self, plan: SnapshotPlan) -> SnapshotPlan:
        """As :meth:`Policy.for_storage`: all of it.

        Raises:
            ValueError: storage has no full checkpoint, without which a partial one is of no use.
        """
        if not self.told.stored and not plan.complete:
            raise PolicyError(
                f"the partial snapshot of iteration {plan.iteration} is of no use in storage, which does not hold all "
                "experts yet. Fix: save everything() at the first iteration that goes there",
                code="storage-lacks-experts",
            )
        return plan

    def on_resume(self, in_memory: bool, in_storage: bool) -> None:
        """As :meth:`Policy.on_resume`: if either tier lacks an expert, the next snapshot is full."""
        self.told.resumed(in_memory, in_storage)

    def storage_lost(self) -> None:
        """As :meth:`Policy.storage_lost`: partial checkpoints need a full one, so the next snapshot is full."""
        self.told.based = self.told.stored = False

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`Policy.state_dict`."""
        return self.told.state_dict()

    def loading(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """As :meth:`Policy.loading`."""
        told = self.told.read(state, self.num_experts)
        return lambda: vars(self.told).update(vars(told))

    @cached_property
    def num_experts(self) -> dict[int, int]:
        """Number of experts by layer, ascending, of layers with experts."""
        return experts_by_layer(self.operators)
