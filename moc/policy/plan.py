"""Defines snapshot plans, and the capabilities of a run that a policy may require."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Protocol

from moc.policy.errors import PolicyError
from moc.state.operators import Detail

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
