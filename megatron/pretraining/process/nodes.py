"""Reads the nodes of the job from this worker's environment, and maps models to them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron.pretraining.config import Config, Workers, copy_by_copy, nodes_of_model, restart_reason, stages_on_nodes
from moc.runtime.environment import min_nodes, node_limits


def per_node() -> int:
    """Returns the number of workers of each node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def workers_of_job() -> Workers:
    """Returns the limits of the job's nodes, and the workers of each node."""
    return Workers(*node_limits(), per_node())


def continues_in_process(config: Config) -> bool:
    """Returns whether workers continue in the same processes when nodes are lost or join."""
    return not restart_reason(config, per_node())


def parts_of_model(config: Config) -> int:
    """Returns the nodes of a model copy, if workers continue in process and keep their part of it; otherwise 1."""
    return nodes_of_model(config, per_node()) if min_nodes() is not None and continues_in_process(config) else 1


def ranks_are_by_copies(config: Config) -> bool:
    """Returns whether ranks are numbered copy by copy of the model, not stage by stage."""
    return copy_by_copy(config, per_node(), min_nodes() is not None)


def stages_on_node(config: Config) -> int:
    """Returns the number of pipeline stages on a node, if ranks are numbered copy by copy; otherwise 1."""
    return stages_on_nodes(config, per_node(), min_nodes() is not None)


@dataclass(frozen=True)
class RanksByCopies:
    """Ranks of a job, copy by copy of the model, followed by the ranks of partial-model nodes.

    megatron-core supports only complete copies. Each stage of a partial-model node is therefore another copy, whose
    other stages are empty.

    Attributes:
        size: world size.
        inner: ranks of a stage of one copy.
        stages: stages of the pipeline.
        stages_per_node: stages that have ranks on a node.
        model_parts: by partial-model node (the last nodes), its part of the model.
    """

    size: int
    inner: int
    stages: int
    stages_per_node: int = 1
    model_parts: Sequence[int] = ()

    @property
    def copies(self) -> int:
        """Number of complete copies of the model."""
        return (self.size - len(self.model_parts) * self.stages_per_node * self.inner) // (self.stages * self.inner)

    @property
    def core_ranks(self) -> int:
        """World size passed to megatron-core, including empty ranks."""
        return (self.copies + len(self.model_parts) * self.stages_per_node) * self.stages * self.inner

    def rank(self, core_rank: int) -> int:
        """Returns the rank of a megatron-core rank, copy by copy; a negative number if it is empty."""
        copy, within = divmod(core_rank, self.stages * self.inner)
        stage, inside = divmod(within, self.inner)
        if copy < self.copies:
            return core_rank
        node, local = divmod(copy - self.copies, self.stages_per_node)
        if stage != self.model_parts[node] * self.stages_per_node + local:
            return -1 - core_rank
        return (self.copies * self.stages + node * self.stages_per_node + local) * self.inner + inside

    def members(self, core_ranks: Sequence[int], across_stages: bool) -> list[int]:
        """Returns the ranks of a group of megatron-core ranks, which are numbered stage by stage.

        With ``across_stages``, ranks keep their positions, and negative numbers mark empty ones. Otherwise, empty ones
        are omitted.
        """
        ranks = [self.rank(by_copies(rank, self.core_ranks, self.inner, self.stages)) for rank in core_ranks]
        existing_ranks = [rank for rank in ranks if rank >= 0]
        return ranks if existing_ranks and across_stages else existing_ranks


@contextlib.contextmanager
def order_of_ranks(config: Config, model_parts: Sequence[int] = ()) -> Iterator[None]:
    """Sets the order of megatron-core's ranks in a context: stage by stage, or copy by copy of the model.

    Copy by copy, a lost node affects complete copies of the model, or a part of one. megatron-core refuses its own
    order of this kind (``tp-cp-ep-pp-dp``) with tensor parallelism, since it orders experts, which fewer ranks split,
    separately. So its default order stays, and its ranks are mapped to others.

    Args:
        config: the flags.
        model_parts: by partial-model node (the last nodes), its part of the model.
    """
    if not ranks_are_by_copies(config):
        yield
        return
    original: Any = parallel_state.RankGenerator
    size_of, parallel, node_stages = dist.get_world_size, config.parallel, stages_on_node(config)
    inner = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    stages = parallel.pipeline_model_parallel_size

    class ByCopies(original):
        def get_ranks(self, token: str) -> list[list[int]]:
            size = self.world_size - len(model_parts) * node_stages * (stages - 1) * inner
            ranks = RanksByCopies(size, inner, stages, node_stages, model_parts)
            groups = (ranks.members(core_ranks, "pp" in token.split("-")) for core_ranks in super().get_ranks(token))
            return [group for group in groups if group]

    def core_world_size(group: Any = None) -> int:
        return (
            size_of(group)
            if group is not None
            else RanksByCopies(size_of(), inner, stages, node_stages, model_parts).core_ranks
        )

    parallel_state.RankGenerator, dist.get_world_size = ByCopies, core_world_size
    try:
        yield
    finally:
        parallel_state.RankGenerator, dist.get_world_size = original, size_of


def by_copies(rank: int, world: int, inner: int, stages: int) -> int:
    """Returns the copy-by-copy rank of a rank that is numbered stage by stage; pure.

    Args:
        rank: rank in the order tensor-, context-, data-parallel rank, stage.
        world: total number of ranks.
        inner: ranks of a stage of one copy.
        stages: stages of the pipeline.
    """
    stage, within = divmod(rank, world // stages)
    copy, inside = divmod(within, inner)
    return (copy * stages + stage) * inner + inside
