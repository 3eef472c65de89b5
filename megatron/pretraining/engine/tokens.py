"""The token ledger of a run: fed by the routers through the vote, kept with snapshots, told what recoveries cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from megatron.core.distributed import DistributedDataParallel

from megatron.pretraining.config import Config, train_iterations
from megatron.pretraining.engine.routing import RouterCounts
from moc.policy import Load, SnapshotPlan
from moc.policy.ledger import Ledger
from moc.recovery.sources import Recovery
from moc.runtime.world import World
from moc.state.detail import Detail
from moc.state.operators import Operator

Experts = dict[int, list[int]]


class Raised(NamedTuple):
    """By how much a recovery has raised the proportion of lost tokens (MoC-System, eq. 7).

    Attributes:
        so_far: of those that were routed so far.
        of_training: of those of the whole training, which by ``--train-iters`` are so many times as many.
    """

    so_far: float = 0.0
    of_training: float = 0.0


class TokenBook:
    """Keeps the ledger; all methods are for all workers alike.

    Args:
        config: the flags in force.
        world: this worker's place.
        chunks: whose routers are counted.
        operators: of the model.
        with_probabilities: hear, too, with what probabilities routers chose.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        chunks: list[DistributedDataParallel],
        operators: Iterable[Operator],
        with_probabilities: bool = False,
    ):
        self._experts = {o.name: (o.layer, o.expert) for o in operators if o.expert is not None}
        numbers: dict[int, int] = {}
        for layer, _ in self._experts.values():
            numbers[layer] = numbers.get(layer, 0) + 1
        padded = config.moe.moe_pad_expert_input_to_capacity
        self._counts = RouterCounts(
            chunks, sorted(numbers), config.moe.num_experts or 0, padded, world.device, with_probabilities
        )
        self._ledger, self._heard = Ledger.of(numbers), ({}, {})
        self._train_iters = max(1, train_iterations(config, world.size))
        self._with_probabilities = with_probabilities
        self.probabilities: dict[int, list[float]] = {}
        """By layer and expert, the sum of those with which it was given tokens in the last iteration."""

    def close(self) -> None:
        """Counts no more."""
        self._counts.close()

    def ballot(self) -> dict:
        """What this worker's routers did; see :class:`megatron.pretraining.engine.step.Rider`."""
        return self._counts.take()

    def voted(self, tally: dict) -> None:
        """Hears what all routers did."""
        self._heard = self._counts.by_layer(tally)
        if self._with_probabilities:
            self.probabilities = self._counts.probabilities(tally)

    def completed(self, skipped: bool) -> None:
        """An iteration is complete; if it was skipped, nobody has learned from it."""
        counts, sent = self._heard
        if skipped:
            counts, sent = {layer: [0] * len(row) for layer, row in counts.items()}, dict.fromkeys(sent, 0)
        self._ledger = self._ledger.after(counts, sent)

    def begun(self, plan: SnapshotPlan, storage: SnapshotPlan | None) -> None:
        """A snapshot begins, and what of it goes to storage."""
        self._ledger = self._ledger.begun(self._saved(plan), None if storage is None else self._saved(storage))

    def brought_to_storage(self, plan: SnapshotPlan) -> None:
        """A snapshot of this iteration, which is complete in memory, begins to go to storage."""
        self._ledger = self._ledger.begun(None, self._saved(plan))

    def snapshotted(self, iteration: int) -> None:
        """A snapshot is complete in memory."""
        self._ledger = self._ledger.snapshotted(iteration)

    def persisted(self, iteration: int) -> None:
        """One is complete in storage."""
        self._ledger = self._ledger.persisted(iteration)

    def starts_at(self, iteration: int) -> None:
        """The run goes on from a checkpoint that has no ledger: nothing is known of what was before."""
        self._counts.take()
        self._ledger = dataclasses.replace(self._ledger, iteration=iteration)

    def goes_on(self, state: Mapping) -> None:
        """Nothing was lost: the ledger is this one."""
        self._ledger = Ledger.from_state(state)

    def recovered(self, way: Recovery, states: Mapping[tuple[int, str], Mapping]) -> Raised:
        """The run goes on in a way; by how much that has raised the proportion of lost tokens.

        Args:
            way: where everything came from.
            states: by checkpoint, the ledger that is stored with it.
        """
        self._counts.take()  # what was computed again is in the ledger already
        ledgers = {key: Ledger.from_state(state) for key, state in states.items()}
        if way.base.key not in ledgers:
            self.starts_at(way.iteration)
            return Raised()
        base, restored = ledgers.pop(way.base.key), {}
        for name, (layer, expert) in self._experts.items():
            restored.setdefault(layer, {})[expert] = way.learned_until(name)
        self._ledger = base.recovered(restored, ledgers.values())
        raised = self._ledger.plt() - base.plt()
        return Raised(raised, raised * min(1.0, way.iteration / self._train_iters))

    @property
    def load(self) -> Load:
        """Tokens by layer and expert since training began."""
        return self._ledger.load

    @property
    def plt(self) -> float:
        """The proportion of lost tokens so far (MoC-System, eq. 7)."""
        return self._ledger.plt()

    @property
    def plt_by_layer(self) -> dict[int, float]:
        """The same for each layer with experts, by its number."""
        return self._ledger.plt_by_layer()

    def state_dict(self) -> dict:
        """The ledger, as JSON can hold it."""
        return self._ledger.state_dict()

    def _saved(self, plan: SnapshotPlan) -> Experts:
        saved: Experts = {}
        for name, detail in plan.operators.items():
            if name in self._experts and detail is Detail.FULL:
                layer, expert = self._experts[name]
                saved.setdefault(layer, []).append(expert)
        return saved
