"""What policies share whose snapshots hold all dense operators, and only some of the experts."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar

from moc.policy.plan import Load, Policy, SnapshotPlan

Table = dict[int, list[int]]
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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of :meth:`state_dict`, also after it was JSON.

        Raises:
            ValueError: the state is of another class.
        """
        try:
            known = self._completed(state)
            found = {one.name: self._read(one.name, known[one.name]) for one in fields(self)}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no state of {self.of}: {state!r}; start without it") from error
        vars(self).update(found)

    def _completed(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The state with what it lacks if an earlier version saved it."""
        return state

    def _read(self, name: str, value: Any) -> Any:
        kind = type(getattr(self, name))
        if kind is dict:
            return {int(layer): [int(one) for one in row] for layer, row in value.items()}
        return kind(value)


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
            raise ValueError(
                f"the partial snapshot of iteration {plan.iteration} is of no use in storage, which does not hold all "
                "experts yet: save everything() at the first iteration that goes there"
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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`Policy.load_state_dict`; the model must be the same, settings may differ."""
        self.told.load_state_dict(state)

    @cached_property
    def num_experts(self) -> dict[int, int]:
        """Number of experts by layer, ascending, of layers with experts."""
        return dict(sorted(Counter(one.place[0] for one in self.operators if one.place is not None).items()))
