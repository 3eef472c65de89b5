"""Chooses the experts of a selective snapshot, and whether their state or their gradients are saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from moc.policy import transfers
from moc.policy.budgets import Sizes
from moc.policy.plan import Load
from moc.policy.selection import Experts, Given, Limit, per_byte, places_of, proportional, scores
from moc.policy.selective_state import Saves, minus
from moc.policy.transfers import Chosen
from moc.state.detail import Detail


@dataclass(frozen=True)
class Choice:
    """A choice of experts at one iteration; pure, and the same on every rank.

    Attributes:
        iteration: of the snapshot.
        load: tokens of each expert since training began.
        rule: ``per-byte`` or ``proportional`` (MoEtion, Algorithm 1).
        score: ``tokens`` or ``tokens-age``, with the rule ``per-byte``.
        max_age: iterations after which an expert, or the base of a chain, is saved first.
        gradients: those of experts are saved in place of their state where they suffice.
        sizes: of both, by which scores count; None if unknown.
        compares: the gradients of an expert that is saved in full, though they suffice, are saved beside its state.
    """

    iteration: int
    load: Load
    rule: str
    score: str
    max_age: int
    gradients: bool = False
    sizes: Sizes | None = None
    compares: bool = False

    def choose(
        self,
        memory: Saves,
        limits: Sequence[Limit],
        before: Chosen = MappingProxyType({}),
        storage: Saves | None = None,
    ) -> Chosen:
        """The experts that fit, each at its detail.

        They are chosen by what memory lacks.  If the snapshot goes to storage too, it is by what storage lacks; where
        gradients are saved, that takes at most half of the limits, so that chains do not end there.

        Args:
            memory: what was saved to memory.
            limits: the budget.
            before: experts that are chosen already, which are among those returned.
            storage: what was saved to storage; None if the snapshot does not go there.
        """
        if not self.gradients:
            found = places_of(self._select(limits, storage or memory, Given(before.keys())))
            return dict.fromkeys(found, Detail.FULL)
        chained = transfers.continuing(transfers.chains_of(memory.bases, memory.at), self.iteration)
        given = Given(before.keys(), [place for place in before if before[place] is Detail.GRAD], share=0.5)
        if storage is not None:
            full = places_of(self._select(limits, storage, given))
        else:
            full = transfers.renewed(memory.bases, chained, self.iteration, self.max_age, limits, given)
        return transfers.choose(partial(self._select, limits, memory), before, full, chained, self.compares)

    def _select(self, limits: Sequence[Limit], saves: Saves, given: Given) -> Experts:
        never = {layer: [0] * len(row) for layer, row in self.load.items()}
        unsaved = minus(self.load, never | saves.tokens)
        if self.rule == "proportional":
            return proportional(unsaved, limits, given)
        ages = {layer: [self.iteration - at for at in row] for layer, row in (never | saves.at).items()}
        by_cost = transfers.by_cost(scores(unsaved, ages, self.score), given.cheaper, self.sizes)
        return per_byte(by_cost, ages, self.max_age, limits, given)


def oldest(experts: int, apart: int, limits: Sequence[Limit]) -> int:
    """Iterations after which an expert is saved first by default: 4 times as many as saving all in turn would take."""
    fitting = min(limit.total() for limit in limits)
    return 4 * apart * -(-experts // max(1, fitting))
