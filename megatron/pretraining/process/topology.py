"""The part of each iteration that one worker computes, in one generation of its job."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config import Config, global_batch_size
from moc.runtime.world import World


@dataclass(frozen=True)
class Topology:
    """A worker's place and its share of the global batch, until the next generation begins.

    A global batch is the next ``global_batch_size`` samples, dealt in turns of ``micro_batch_size`` to the
    data-parallel ranks, as in Megatron-LM; an iteration therefore reads the same samples at any data-parallel size.
    Micro batch ``g`` is computed in round ``g // data_size``.  In the last round, ranks without one compute a ghost,
    so that collectives of the others find them there (``--elastic``; else there are none).  Workers that help do so in
    every round.
    """

    world: World
    micro_batch_size: int
    global_batch_size: int

    @property
    def micro_batches(self) -> range:
        """The numbers of this worker's micro batches within the global batch."""
        micro_batches = self.global_batch_size // self.micro_batch_size
        return range(self.world.data_rank, 0 if self.world.helps else micro_batches, self.world.data_size)

    @property
    def rounds(self) -> int:
        """Micro batches that each rank computes, ghosts included."""
        return -(-(self.global_batch_size // self.micro_batch_size) // self.world.data_size)

    def number(self, round: int) -> int:
        """The number of this worker's micro batch of a round; a ghost's is not below that of the last micro batch."""
        return (self.rounds if self.world.helps else round) * self.world.data_size + self.world.data_rank

    def is_ghost(self, round: int) -> bool:
        """Whether this worker has no samples for a round."""
        return self.number(round) * self.micro_batch_size >= self.global_batch_size

    @property
    def mean_micro_batches(self) -> float:
        """Micro batches by data-parallel rank, ghosts not counted."""
        return self.global_batch_size / (self.micro_batch_size * self.world.data_size)

    def samples(self, consumed_samples: int) -> list[range]:
        """The samples of each of this worker's micro batches, in the iteration that starts at ``consumed_samples``."""
        starts = (consumed_samples + number * self.micro_batch_size for number in self.micro_batches)
        return [range(start, start + self.micro_batch_size) for start in starts]


def topology_of(config: Config, world: World) -> Topology:
    """The topology that the flags give to a place."""
    return Topology(world, config.training.micro_batch_size, global_batch_size(config, world.size))
