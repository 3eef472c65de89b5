"""Chooses the experts of a selective snapshot, and whether their state or their gradients are saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from moc.policy import transfers
from moc.policy.budgets import Sizes
from moc.policy.partial import Saves
from moc.policy.plan import Load
from moc.policy.selection import Experts, Given, Limit, per_byte, places_of, proportional, scores
from moc.policy.selective_state import minus
from moc.policy.transfers import Chosen
from moc.state.detail import Detail

STORAGE_SHARE = 0.5
"""Share of the limits for experts that are stored in full, if memory receives gradients of the others."""

OLD = 4
"""Cycles through all experts after which an expert is saved first, whatever its score."""

STORAGE_CYCLES = OLD + 2
"""Cycles until storage has a new version of each expert: old experts take at most half of each snapshot."""


@dataclass(frozen=True)
class Choice:
    """A choice of experts at one iteration; pure, and the same on every rank.

    Attributes:
        iteration: iteration of the snapshot.
        load: tokens of each expert since training began.
        rule: ``per-byte`` or ``proportional`` (MoEtion, Algorithm 1).
        score: ``tokens`` or ``tokens-age``, with the rule ``per-byte``.
        max_age: iterations after which an expert, or the base of a chain, is saved first.
        gradients: gradients are saved in place of state where they suffice.
        sizes: sizes of both, by which scores count; None if unknown.
        compares: if an expert is saved in full although its gradients suffice, these are saved, too.
        storage_max_age: as ``max_age``, for versions in storage; None for :data:`OLD` cycles at their last speed.
    """

    iteration: int
    load: Load
    rule: str
    score: str
    max_age: int
    gradients: bool = False
    sizes: Sizes | None = None
    compares: bool = False
    storage_max_age: float | None = None

    def choose(
        self,
        memory: Saves,
        limits: Sequence[Limit],
        before: Chosen = MappingProxyType({}),
        storage: Saves | None = None,
    ) -> Chosen:
        """Returns the experts that fit, each at its detail.

        The choice depends on the tokens that memory lacks, or storage if the snapshot is stored. If gradients are
        saved, the choice for storage:

        * takes at most :data:`STORAGE_SHARE` of the limits, and leaves the rest for chains,
        * ranks by tokens times iterations, since storage has no gradients.

        Args:
            memory: saves to memory.
            limits: the budget.
            before: experts that are chosen already, and included in the result.
            storage: versions in storage, or on their way there; None if the snapshot is not stored.
        """
        by_storage = self if storage is None else self._by_storage(storage, limits)
        if not self.gradients:
            found = places_of(by_storage._select(limits, storage or memory, Given(before.keys())))
            return dict.fromkeys(found, Detail.FULL)
        chained = transfers.continuing(transfers.chains_of(memory.bases, memory.at), self.iteration)
        given = Given(before.keys(), [place for place in before if before[place] is Detail.GRAD], STORAGE_SHARE)
        if storage is not None:
            full = places_of(by_storage._select(limits, storage, given))
        else:
            full = transfers.renewed(memory.bases, chained, self.iteration, self.max_age, limits, given)
        return transfers.choose(partial(self._select, limits, memory), before, full, chained, self.compares)

    def _by_storage(self, storage: Saves, limits: Sequence[Limit]) -> Choice:
        """Returns the choice for storage, with the age limit from the measured speed of storage."""
        since_last = self.iteration - max(map(max, storage.at.values()), default=0)
        old = OLD * cycle(sum(map(len, storage.at.values())), limits, self.gradients) * since_last
        return replace(
            self,
            score="tokens-age" if self.gradients else self.score,
            max_age=old if self.storage_max_age is None else self.storage_max_age,
        )

    def _select(self, limits: Sequence[Limit], saves: Saves, given: Given) -> Experts:
        never = {layer: [0] * len(row) for layer, row in self.load.items()}
        unsaved = minus(self.load, never | saves.tokens)
        if self.rule == "proportional":
            return proportional(unsaved, limits, given)
        ages = {layer: [self.iteration - at for at in row] for layer, row in (never | saves.at).items()}
        by_cost = transfers.by_cost(scores(unsaved, ages, self.score), given.cheaper, self.sizes)
        return per_byte(by_cost, ages, self.max_age, limits, given)


def cycle(experts: int, limits: Sequence[Limit], gradients: bool) -> int:
    """Returns the number of stored snapshots until each expert was in one, if experts take turns."""
    share = STORAGE_SHARE if gradients else 1.0
    return -(-experts // max(1, int(share * min(limit.total() for limit in limits))))


def oldest(experts: int, apart: int, limits: Sequence[Limit]) -> int:
    """Returns the default number of iterations after which an expert is saved first."""
    return OLD * apart * cycle(experts, limits, gradients=False)
