"""Computes one worker's part of each iteration, in one generation of its job, and runs functions on rank 0."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from megatron.pretraining.config import Config, global_batch_size
from moc.runtime.job import World


@dataclass(frozen=True)
class Topology:
    """A worker's coordinates and its share of the global batch, in one generation.

    A global batch is the next ``global_batch_size`` samples. They are dealt to the data-parallel ranks in turn, in
    micro batches, as in Megatron-LM. So an iteration reads the same samples at any data-parallel size. Micro batch
    ``g`` is computed in round ``g // data_size``. With ``--elastic``, ranks without one in the last round compute a
    dummy, so that they join the collectives of other ranks. Workers of partial-model nodes compute a dummy in every
    round.
    """

    world: World
    micro_batch_size: int
    global_batch_size: int

    @property
    def micro_batches(self) -> range:
        """Numbers of this worker's micro batches within the global batch."""
        micro_batches = self.global_batch_size // self.micro_batch_size
        return range(self.world.data_rank, 0 if self.world.is_partial_model else micro_batches, self.world.data_size)

    @property
    def rounds(self) -> int:
        """Micro batches that each rank computes, including dummies."""
        return -(-(self.global_batch_size // self.micro_batch_size) // self.world.data_size)

    def number(self, round: int) -> int:
        """Returns the number of this worker's micro batch in a round; dummies are numbered after all others."""
        return (self.rounds if self.world.is_partial_model else round) * self.world.data_size + self.world.data_rank

    def is_dummy(self, round: int) -> bool:
        """Returns whether this worker has no samples in a round."""
        return self.number(round) * self.micro_batch_size >= self.global_batch_size

    @property
    def mean_micro_batches(self) -> float:
        """Mean number of micro batches per data-parallel rank, without dummies."""
        return self.global_batch_size / (self.micro_batch_size * self.world.data_size)

    def samples(self, consumed_samples: int) -> list[range]:
        """Returns the samples of each of this worker's micro batches, in the iteration from ``consumed_samples`` on."""
        starts = (consumed_samples + number * self.micro_batch_size for number in self.micro_batches)
        return [range(start, start + self.micro_batch_size) for start in starts]


def topology_of(config: Config, world: World) -> Topology:
    """Returns the topology of a worker with these flags and coordinates."""
    return Topology(world, config.training.micro_batch_size, global_batch_size(config, world.size))


PATIENCE = 15.0  # seconds for rank 0 to report and exit; the launcher then ends the other workers


def is_first_worker() -> bool:
    """Returns whether this process is rank 0, or belongs to no job."""
    return os.environ.get("RANK", "0") == "0"


def wait_for_first_worker() -> None:
    """Waits, except on rank 0, until rank 0 can have reported; others then report errors that only they have."""
    if not is_first_worker():
        time.sleep(PATIENCE)
