"""Training data by position: the samples of an iteration are a function of the consumed samples alone.

The datasets are megatron-core's (``GPTDataset``, ``IndexedDataset``, blends).  A stream starts at any position and
reads ahead from there, without reading what precedes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from megatron.pretraining.config import ConfigError
from megatron.pretraining.process.topology import Topology
from moc.runtime.children import serve_host

Batch = dict[str, torch.Tensor]


class BatchStream:
    """The micro batches of one worker, from any position on, in the topology of any generation, ghosts included.

    ``num_workers`` processes read them, 0 this process.  With ``wrap`` (evaluation) the stream starts over at the end
    of the dataset, instead of running out of batches.
    """

    has_data = True

    def __init__(self, dataset: torch.utils.data.Dataset, num_workers: int = 0, wrap: bool = False):
        self._dataset, self._num_workers, self._wrap = dataset, num_workers, wrap
        self._reader: Iterator[Batch] | None = None
        self._place: tuple[Topology, int] | None = None  # the reader's, in consumed samples, if between iterations
        self._ghost: Batch | None = None

    def close(self) -> None:
        """Ends the reader processes."""
        self._reader = None

    def iteration(self, topology: Topology, consumed_samples: int) -> Iterator[Batch]:
        """The micro batches of the iteration that starts at ``consumed_samples``, on this worker's device."""
        if self._reader is None or self._place != (topology, consumed_samples):
            self._reader = iter(self._loader(topology, consumed_samples))
        self._place = None  # unknown until the whole iteration has been drawn
        for turn in range(topology.rounds):
            batch = self._ghost_of(topology) if topology.is_ghost(turn) else next(self._reader, None)
            if batch is None:
                raise ConfigError(
                    f"--train-iters and --global-batch-size give fewer samples than the {consumed_samples} that the "
                    "run has read. Fix: resume with the global batch size that the checkpoint was saved with",
                    code="samples-too-few",
                )
            if turn == topology.rounds - 1:  # nobody asks for more than the last one
                self._place = topology, consumed_samples + topology.global_batch_size
            yield {k: v.to(topology.world.device, non_blocking=True) for k, v in batch.items()}

    def _ghost_of(self, topology: Topology) -> Batch:
        """A micro batch of a sample without any token that counts in the loss."""
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
            generator=torch.Generator(),  # else a new reader draws its seed from the random streams of training
            worker_init_fn=partial(_belong, os.getpid()),
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


def _belong(parent: int, _: int) -> None:
    """Ends a reader with its worker, which torch's readers notice within 5 s; it holds no GPU."""
    serve_host(parent)


class _IndexLists:
    """A batch sampler, restartable as torch's DataLoader requires."""

    def __init__(self, make, *where):
        self._make, self._where = make, where

    def __iter__(self):
        return self._make(*self._where)
