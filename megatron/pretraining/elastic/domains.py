"""Creates the process groups for token dispatch if a stage has more workers than a domain."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron.pretraining.config import Config, plan_settings, stage_size
from megatron.pretraining.elastic.groups import dispatch_within
from megatron.pretraining.elastic.placing import nodes_of
from moc.elastic.allocation import spans


def build_domains(config: Config, most: int) -> None:
    """Creates the group of each domain, on all ranks, after megatron-core's groups and numbered like them.

    A continuing worker needs equally many groups in each generation. So it has a domain group even if the few remaining
    nodes form one domain.

    Args:
        config: the flags.
        most: workers of the job if all nodes are connected.
    """
    dispatch_within(None)
    parallel, world = config.parallel, dist.get_world_size()
    if not config.elastic.elastic or len(_ranks_of_domains(config, most, stage_size(config, most))) == 1:
        return
    tp, pp, cp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    ranks = parallel_state.RankGenerator(tp=tp, ep=1, dp=world // (tp * pp * cp), pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    for stage in ranks.get_ranks("tp-dp-cp"):
        for domain in spans(_ranks_of_domains(config, world, len(stage))):
            members = sorted(stage)[domain]
            group: Any = dist.new_group(members, group_desc="ELASTIC_DOMAIN")
            if dist.get_rank() in members:
                dispatch_within(group)


def _ranks_of_domains(config: Config, workers: int, size: int) -> list[int]:
    """Returns the ranks of each domain of a stage of ``size`` workers, as in its plan; ``workers`` are all."""
    ranks = nodes_of(config, workers)[0].ranks
    domains = plan_settings(config, ranks).domains(size // ranks, config.moe.num_experts or 0)
    return [of * ranks for of in domains]
