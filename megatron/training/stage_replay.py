"""One pipeline stage computes an iteration again from the logs of its neighbours: MoEvement, section 3.4.

The schedule, the model and the reductions among the stage's own peers are those of training; what the stage would
receive comes from logs, and what it would send goes nowhere.  So its gradients are those that were, to the last bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.transformer import TransformerConfig

from megatron.training.boundary import Replayer, pipeline_of
from megatron.training.upstream import Boundaries
from moc.logs.crossings import Crossing
from moc.store.errors import MissingRegionError
from moc.store.regions import bytes_of


class StageReplay(Boundaries):
    """This worker's stage computes iterations again, alone with its tensor-, data- and expert-parallel peers.

    Embeddings that are tied across stages cannot be reduced so: ``--upstream-logging`` refuses them.

    Args:
        core_config: of the model.
        num_micro_batches: in an iteration.
        source: gives what this stage received in an iteration, counted from 1; from the logs of its neighbours.
        sink: takes what it sends.
    """

    def __init__(
        self,
        core_config: TransformerConfig,
        num_micro_batches: int,
        source: Callable[[int, Crossing], torch.Tensor],
        sink: Callable[[int, Crossing, torch.Tensor], None],
    ):
        self._core_config, self._source, self._sink = core_config, source, sink
        self._pipeline = pipeline_of(core_config, num_micro_batches)

    @contextlib.contextmanager
    def crossed(self, iteration: int) -> Iterator[Replayer]:
        """See :class:`Boundaries`."""
        yield Replayer(
            self._core_config,
            self._pipeline,
            lambda crossing: self._source(iteration, crossing),
            lambda crossing, tensor: self._sink(iteration, crossing, tensor),
        )

    def reduce(self, chunks: list[DistributedDataParallel], tokens: torch.Tensor | None, known: int | None) -> None:
        """See :class:`Boundaries`; no other stage takes part."""
        finalize_model_grads(chunks, None)  # only tied embeddings and the number of tokens would ask another stage
        if tokens is not None and known:  # of which only the last stage knows; the total is in the step record
            for chunk in chunks:
                chunk.scale_gradients(1.0 / torch.full_like(tokens, known))


class Comparison:
    """A sink that compares what a stage sends again with what it once sent, where there is a log of that.

    Args:
        logged: gives what was sent, in an iteration counted from 1; MissingRegionError where that is not known.

    Attributes:
        compared: how many tensors were.
        different: those that were not the same, bit by bit.
    """

    def __init__(self, logged: Callable[[int, Crossing], torch.Tensor]):
        self._logged = logged
        self.compared = 0
        self.different: list[tuple[int, Crossing]] = []

    def __call__(self, iteration: int, crossing: Crossing, tensor: torch.Tensor) -> None:
        """Compares one tensor."""
        try:
            logged = self._logged(iteration, crossing)
        except MissingRegionError:
            return
        self.compared += 1
        if bytes_of(tensor.cpu()) != bytes_of(logged):
            self.different.append((iteration, crossing))
