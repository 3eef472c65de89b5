"""Keeps the token ledger of a run: fed by the commit all-reduce, saved with snapshots, adjusted by recoveries."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from moc.policy import Capability, Load, Policy, SnapshotPlan
from moc.policy.expert_selection import lost_tokens_by_layer
from moc.policy.token_ledger import TokenDebt, TokenLedger
from moc.recovery.sources import RecoveryPath
from moc.session.engine import Engine
from moc.state.operators import Detail

Experts = dict[int, list[int]]


class Raised(NamedTuple):
    """Increase of the proportion of lost tokens by a recovery (MoC-System, eq. 7).

    Attributes:
        so_far: relative to the tokens routed so far.
        of_training: relative to the tokens of the entire training, by ``--train-iters``.
    """

    so_far: float = 0.0
    of_training: float = 0.0


class TokenTracker:
    """Token ledger of a run and its updates; every worker calls every method."""

    def __init__(self, engine: Engine, train_iters: int, policy: Policy):
        self._experts = {o.name: o.expert_id for o in engine.operators if o.expert_id is not None}
        numbers: dict[int, int] = {}
        for layer, _ in self._experts.values():
            numbers[layer] = numbers.get(layer, 0) + 1
        self._with_probabilities = Capability.GATING_PROBABILITIES in policy.requires
        self._boost = policy.recovery.capacity_boost
        self._counts = engine.router_tally(sorted(numbers), self._with_probabilities)
        self._ledger, self._routed, self._beyond = TokenLedger.empty(numbers), ({}, {}), {}
        self._train_iters = max(1, train_iters)
        self.probabilities: dict[int, list[float]] = {}
        """By layer and expert, the sum of the gating probabilities over the expert's tokens of the last iteration."""

    def close(self) -> None:
        """Stops counting."""
        self._counts.close()

    def contribution(self) -> dict:
        """Returns the counts of this worker's routers; see :class:`moc.session.engine.CommitParticipant`."""
        return self._counts.take()

    def on_totals(self, totals: dict) -> None:
        """Receives the counts of all routers."""
        self._routed, self._beyond = self._counts.by_layer(totals), self._counts.beyond(totals)
        if self._with_probabilities:
            self.probabilities = self._counts.probabilities(totals)

    def completed(self, skipped: bool) -> None:
        """Records a completed iteration; if it was skipped, no expert has learned from it."""
        (counts, sent), beyond = self._routed, self._beyond
        if skipped:
            counts, sent, beyond = {layer: [0] * len(row) for layer, row in counts.items()}, dict.fromkeys(sent, 0), {}
        self._continue(self._ledger.after_iteration(counts, sent, beyond))

    def on_start(self, plan: SnapshotPlan, storage: SnapshotPlan | None) -> None:
        """Records the start of a snapshot, with the part of it that goes to storage."""
        stored = None if storage is None else self._saved(storage)
        self._ledger = self._ledger.with_snapshot(self._saved(plan), stored, self._saved(plan.remote_plan))

    def on_write_start(self, plan: SnapshotPlan) -> None:
        """Records that a snapshot of this iteration, complete in memory, starts on its way to storage."""
        self._ledger = self._ledger.with_snapshot(None, self._saved(plan))

    def on_memory_complete(self, iteration: int) -> None:
        """Records a snapshot as complete in memory."""
        self._ledger = self._ledger.with_snapshot_completed(iteration)

    def on_storage_complete(self, iteration: int) -> None:
        """Records a snapshot as complete in storage."""
        self._ledger = self._ledger.with_persist_completed(iteration)

    def start_at(self, iteration: int) -> None:
        """Starts at a checkpoint without a ledger: earlier tokens are unknown."""
        self._counts.take()
        self._ledger = dataclasses.replace(self._ledger, iteration=iteration)

    def continue_from(self, state: Mapping) -> None:
        """Continues a saved ledger, after a recovery without losses."""
        self._continue(TokenLedger.from_state(state))

    def recovered(self, path: RecoveryPath, states: Mapping[tuple[int, str], Mapping]) -> Raised:
        """Adjusts the ledger to a recovery path; returns the increase of the proportion of lost tokens.

        ``states`` has, by checkpoint, the ledger stored with it.
        """
        self._counts.take()  # the ledger already has the replayed iterations
        ledgers = {key: TokenLedger.from_state(state) for key, state in states.items()}
        if path.base.key not in ledgers:
            self.start_at(path.iteration)
            return Raised()
        base, restored = ledgers.pop(path.base.key), {}
        for name, (layer, expert) in self._experts.items():
            restored.setdefault(layer, {})[expert] = path.learned_until(name)
        recovered = base.after_recovery(restored, ledgers.values())
        self._continue(recovered if self._boost is None else recovered.with_debt(base, self._boost.iterations))
        raised = self._ledger.plt() - base.plt()
        return Raised(raised, self._of_training(raised))

    @property
    def load(self) -> Load:
        """Tokens by layer and expert since training began."""
        return self._ledger.load

    @property
    def plt(self) -> float:
        """Proportion of lost tokens so far (MoC-System, eq. 7)."""
        return self._ledger.plt()

    @property
    def plt_of_training(self) -> float:
        """Lost tokens so far, as a proportion of the tokens of the entire training."""
        return self._of_training(self._ledger.plt())

    @property
    def plt_by_layer(self) -> dict[int, float]:
        """Proportion of lost tokens so far, by number of each layer with experts."""
        return self._ledger.plt_by_layer()

    @property
    def gauges(self) -> dict[str, float]:
        """Values to report with every iteration."""
        debt = sum(map(sum, self._ledger.remaining_debt.values()))
        return {"plt": self.plt} | ({"tokens_owed": debt} if debt else {})

    def storage_lacks(self, resumed: int) -> float:
        """Returns the tokens that experts would lose if all memory were lost, in iterations: the mean over layers.

        Args:
            resumed: iteration that the run would resume from; later iterations would be repeated, not lost.
        """
        routed = {layer: sum(row) for layer, row in self._routed[0].items()}
        lost = lost_tokens_by_layer(
            self._ledger.since_persist, {layer: routed.get(layer, 0) for layer in self._ledger.layers}
        )
        return max(0.0, sum(lost) / max(1, len(lost)) - (self._ledger.iteration - resumed))

    @property
    def debt(self) -> TokenDebt | None:
        """Lost tokens that experts compensate with more capacity; None if there never were any."""
        return self._ledger.debt

    def state_dict(self) -> dict:
        """Returns the ledger as JSON-compatible values."""
        return self._ledger.state_dict()

    def _of_training(self, plt: float) -> float:
        return plt * min(1.0, self._ledger.iteration / self._train_iters)

    def _continue(self, ledger: TokenLedger) -> None:
        """Replaces the ledger, and gives the experts that owe tokens in it more capacity, if wanted."""
        self._ledger = ledger if self._boost is not None else dataclasses.replace(ledger, debt=None)
        if self._boost is not None:
            self._counts.boost(ledger.remaining_debt, self._boost.fraction)

    def _saved(self, plan: SnapshotPlan) -> Experts:
        saved: Experts = {}
        for name, detail in plan.operators.items():
            if name in self._experts and detail is Detail.FULL:
                layer, expert = self._experts[name]
                saved.setdefault(layer, []).append(expert)
        return saved
