"""Hooks of micro batches in elastic training: random streams per micro batch number, and dummy micro batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from megatron.pretraining.elastic.layer import ElasticLayer
from megatron.pretraining.engine.schedule import Turns
from megatron.pretraining.process.initialize import seed_streams
from megatron.pretraining.process.topology import Topology


class ElasticTurns(Turns):
    """Hooks that seed random streams for each micro batch, and mark dummy micro batches in the layers.

    A dummy's tokens reach no router and no expert, and its loss is 0: it only takes part in the collectives of other
    workers.
    """

    def __init__(self, seed: int, topology: Topology, layers: Iterable[ElasticLayer]):
        super().__init__(seed, topology)
        self._layers = list(layers)
        self._iteration: int | None = None
        self._turn = 0

    def begin(self, iteration: int | None) -> None:
        """See :class:`Turns`."""
        self._iteration, self._turn = iteration, 0

    def take(self, compute: Callable[[], tuple[torch.Tensor, Callable]]) -> tuple[torch.Tensor, Callable]:
        """See :class:`Turns`."""
        turn, self._turn = self._turn, self._turn + 1
        self._come_to(turn)
        if self._iteration is not None:
            seed_streams(self._seed, self._iteration, self._topology.world, self._topology.number(turn))
        output, loss_function = compute()
        if output.requires_grad:  # a recomputed layer reads is_ghost again in this micro batch's backward pass
            output.register_hook(lambda _: self._come_to(turn))
        return output, loss_function

    def _come_to(self, turn: int) -> None:
        for layer in self._layers:
            layer.is_ghost = self._topology.is_ghost(turn)
