"""The nodes of the job, as the environment of this worker tells them, and how models lie on them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from megatron.core import parallel_state

from megatron.pretraining.config import Config, copy_by_copy, nodes_of_model, stages_on_nodes, why_anew
from moc.runtime import environment


def per_node() -> int:
    """Workers of each node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def numbers_of_nodes() -> tuple[int, int]:
    """MIN and MAX of the job's nodes; equal if their number does not vary."""
    least, most = (int(os.environ.get(name, "1")) for name in (environment.LEAST_PLACES, environment.PLACES))
    return least, most


def fewest_nodes() -> int | None:
    """The nodes with which a job of MIN to MAX nodes still goes on; None if their number does not vary."""
    least, most = numbers_of_nodes()
    return least if least < most else None


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


@contextlib.contextmanager
def order_of_ranks(config: Config) -> Iterator[None]:
    """Context in which megatron-core numbers the ranks of a job: stage by stage, or copy by copy of the model.

    Copy by copy, a node that is lost takes whole copies of the model along, or a part of one.  megatron-core has such
    an order too (``tp-cp-ep-pp-dp``), but refuses it with tensor parallelism, since it orders experts, which are split
    by fewer ranks, apart.  So its own order stays, and names other ranks.
    """
    if not goes_by_copies(config):
        yield
        return
    original: Any = parallel_state.RankGenerator
    stages = config.parallel.pipeline_model_parallel_size

    class ByCopies(original):
        def get_ranks(self, token: str) -> list[list[int]]:
            inner = config.parallel.tensor_model_parallel_size * config.parallel.context_parallel_size
            return [[by_copies(rank, self.world_size, inner, stages) for rank in of] for of in super().get_ranks(token)]

    parallel_state.RankGenerator = ByCopies
    try:
        yield
    finally:
        parallel_state.RankGenerator = original


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
