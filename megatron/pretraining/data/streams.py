"""Provides training data by position: the samples of an iteration depend only on the consumed samples.

The datasets are megatron-core's (``GPTDataset``, ``IndexedDataset``, blends).  A stream starts at any position and
reads ahead from it, without reading earlier samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from megatron.pretraining.config import ConfigError
from megatron.pretraining.data.identity import TokenIdLimit
from megatron.pretraining.process.topology import Topology
from moc.runtime.child_processes import begin_reader

Batch = dict[str, torch.Tensor]


class BatchStream:
    """Micro batches of one worker, from any position and in the topology of any generation, including dummy ones.

    ``num_workers`` processes read them, or this process if it is 0.  With ``wrap`` (evaluation), the stream starts over
    at the end of the dataset.  Tokens outside of ``limit`` raise DataError.
    """

    has_data = True

    def __init__(
        self,
        dataset: torch.utils.data.Dataset,
        num_workers: int = 0,
        wrap: bool = False,
        limit: TokenIdLimit | None = None,
    ):
        self._dataset, self._num_workers, self._wrap, self._limit = dataset, num_workers, wrap, limit
        self._reader: Iterator[Batch] | None = None
        self._place: tuple[Topology, int] | None = None  # consumed samples; None within an iteration
        self._ghost: Batch | None = None

    def close(self) -> None:
        """Ends the reader processes."""
        self._reader = None

    def iteration(self, topology: Topology, consumed_samples: int) -> Iterator[Batch]:
        """Yields the micro batches of the iteration at ``consumed_samples``, on this worker's device."""
        if self._reader is None or self._place != (topology, consumed_samples):
            self._reader = iter(self._loader(topology, consumed_samples))
        self._place = None  # unknown until all micro batches of the iteration are drawn
        for turn in range(topology.rounds):
            batch = self._ghost_of(topology) if topology.is_dummy(turn) else next(self._reader, None)
            if batch is None:
                raise ConfigError(
                    f"--train-iters and --global-batch-size give fewer samples than the {consumed_samples} that the "
                    "run has read. Fix: resume with the global batch size that the checkpoint was saved with",
                    code="samples-too-few",
                )
            if self._limit is not None:
                self._limit.check(batch)
            if turn == topology.rounds - 1:  # the caller draws no batch after the last one
                self._place = topology, consumed_samples + topology.global_batch_size
            yield {k: v.to(topology.world.device, non_blocking=True) for k, v in batch.items()}

    def _ghost_of(self, topology: Topology) -> Batch:
        """Returns a dummy micro batch, whose tokens have loss mask 0."""
        ghost = self._ghost
        if ghost is None:
            sample: Batch = torch.utils.data.default_collate([self._dataset[0]] * topology.micro_batch_size)
            ghost = self._ghost = sample | {"loss_mask": torch.zeros_like(sample["loss_mask"])}
        return ghost

    def _loader(self, topology: Topology, consumed_samples: int) -> torch.utils.data.DataLoader:
        return torch.utils.data.DataLoader(
            self._dataset,
            batch_sampler=_IndexLists(self._indices_from, topology, consumed_samples),
            num_workers=self._num_workers,
            pin_memory=topology.world.device.type == "cuda",
            generator=torch.Generator(),  # otherwise a new reader would draw its seed from training's random generator
            worker_init_fn=partial(begin_reader, None),
        )

    def _indices_from(self, topology: Topology, consumed_samples: int) -> Iterator[list[int]]:
        dataset: Any = self._dataset  # torch's Dataset declares no length
        total = len(dataset)
        while topology.micro_batches:
            for indices in topology.samples(consumed_samples):
                if not self._wrap and indices[-1] >= total:
                    return
                yield [i % total for i in indices]
            consumed_samples += topology.global_batch_size


class _IndexLists:
    """A batch sampler, restartable as torch's DataLoader requires."""

    def __init__(self, make, *where):
        self._make, self._where = make, where

    def __iter__(self):
        return self._make(*self._where)
