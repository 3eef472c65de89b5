"""The nodes of the job, as the environment of this worker tells them, and how models lie on them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron.pretraining.config import Config, Workers, copy_by_copy, nodes_of_model, stages_on_nodes, why_anew
from moc.runtime.environment import fewest_nodes, numbers_of_nodes


def per_node() -> int:
    """Workers of each node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def workers_of_job() -> Workers:
    """The workers of the job."""
    return Workers(*numbers_of_nodes(), per_node())


def goes_on_in_process(config: Config) -> bool:
    """Whether workers go on in the same processes when nodes are lost or come."""
    return not why_anew(config, per_node())


def parts_of_model(config: Config) -> int:
    """Nodes that a copy of the model takes, where workers go on in process and keep their part of it; else 1."""
    return nodes_of_model(config, per_node()) if fewest_nodes() is not None and goes_on_in_process(config) else 1


def goes_by_copies(config: Config) -> bool:
    """Whether ranks are numbered copy by copy of the model, and not stage by stage."""
    return copy_by_copy(config, per_node(), fewest_nodes() is not None)


def stages_here(config: Config) -> int:
    """Pipeline stages of which a node has workers, where ranks are numbered copy by copy; else 1."""
    return stages_on_nodes(config, per_node(), fewest_nodes() is not None)


@dataclass(frozen=True)
class RanksByCopies:
    """The ranks of a job, copy by copy of the model, and behind them those of nodes that help.

    megatron-core knows whole copies alone.  So it is told of one more copy for each stage of a node that helps, of
    which that stage has ranks, and nobody is in the others.

    Attributes:
        size: of the world.
        inner: ranks of a stage of one copy.
        stages: of the pipeline.
        here: stages of which a node has ranks.
        helpers: of the last nodes, the part of the model that each has.
    """

    size: int
    inner: int
    stages: int
    here: int = 1
    helpers: Sequence[int] = ()

    @property
    def copies(self) -> int:
        """Whole copies of the model."""
        return (self.size - len(self.helpers) * self.here * self.inner) // (self.stages * self.inner)

    @property
    def told(self) -> int:
        """Ranks that megatron-core is told of."""
        return (self.copies + len(self.helpers) * self.here) * self.stages * self.inner

    def rank(self, told: int) -> int:
        """The rank of one that megatron-core is told of, copy by copy; nobody is a negative number."""
        copy, within = divmod(told, self.stages * self.inner)
        stage, inside = divmod(within, self.inner)
        if copy < self.copies:
            return told
        node, local = divmod(copy - self.copies, self.here)
        if stage != self.helpers[node] * self.here + local:
            return -1 - told
        return (self.copies * self.stages + node * self.here + local) * self.inner + inside

    def members(self, told: Sequence[int], across_stages: bool) -> list[int]:
        """The ranks of a group of those that megatron-core is told of, numbered stage by stage.

        Where it is ``across_stages``, each keeps its place, and nobody has the others; elsewhere, those that are there
        are the group.
        """
        found = [self.rank(by_copies(rank, self.told, self.inner, self.stages)) for rank in told]
        there = [rank for rank in found if rank >= 0]
        return found if there and across_stages else there


@contextlib.contextmanager
def order_of_ranks(config: Config, helpers: Sequence[int] = ()) -> Iterator[None]:
    """Context in which megatron-core numbers the ranks of a job: stage by stage, or copy by copy of the model.

    Copy by copy, a node that is lost takes whole copies of the model along, or a part of one.  megatron-core has such
    an order too (``tp-cp-ep-pp-dp``), but refuses it with tensor parallelism, since it orders experts, which are split
    by fewer ranks, apart.  So its own order stays, and names other ranks.

    Args:
        config: the flags.
        helpers: of the last nodes, which help: the part of the model that each has.
    """
    if not goes_by_copies(config):
        yield
        return
    original: Any = parallel_state.RankGenerator
    size_of, parallel, here = dist.get_world_size, config.parallel, stages_here(config)
    inner = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    stages = parallel.pipeline_model_parallel_size

    class ByCopies(original):
        def get_ranks(self, token: str) -> list[list[int]]:
            size = self.world_size - len(helpers) * here * (stages - 1) * inner
            ranks = RanksByCopies(size, inner, stages, here, helpers)
            groups = (ranks.members(of, "pp" in token.split("-")) for of in super().get_ranks(token))
            return [group for group in groups if group]

    def told(group: Any = None) -> int:
        return size_of(group) if group is not None else RanksByCopies(size_of(), inner, stages, here, helpers).told

    parallel_state.RankGenerator, dist.get_world_size = ByCopies, told
    try:
        yield
    finally:
        parallel_state.RankGenerator, dist.get_world_size = original, size_of


def by_copies(rank: int, world: int, inner: int, stages: int) -> int:
    """The rank, copy by copy, of one that is numbered stage by stage; pure.

    Args:
        rank: in the order tensor-, context-, data-parallel rank, stage.
        world: ranks in all.
        inner: ranks of a stage of one copy.
        stages: of the pipeline.
    """
    stage, within = divmod(rank, world // stages)
    copy, inside = divmod(within, inner)
    return (copy * stages + stage) * inner + inside
