"""Process groups of elastic training."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.pretraining.config import Config

_domain: dist.ProcessGroup | None = None  # a global, as are megatron-core's groups


def exchange_group() -> dist.ProcessGroup:
    """Returns the workers of this pipeline stage, which exchange gradients and state of its experts."""
    group: Any = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return group


def dispatch_group() -> dist.ProcessGroup:
    """Returns the workers that exchange tokens: a domain of the exchange group, or all of it."""
    return _domain or exchange_group()


def dispatch_within(group: dist.ProcessGroup | None) -> None:
    """Sets the domain for this worker's dispatch of tokens; None for all of the exchange group."""
    global _domain
    _domain = group


def gradient_groups(config: Config) -> ProcessGroupCollection | None:
    """Returns the groups for gradient reduction and optimizer sharding; None for megatron-core's own.

    With ``--elastic``, the groups of experts contain only this worker: :mod:`megatron.pretraining.elastic.gradients`
    sums their gradients.
    """
    if not config.elastic.elastic:
        return None
    groups: Any = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.dp = parallel_state.get_data_parallel_group()
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    groups.mp = parallel_state.get_model_parallel_group()
    groups.tp_ep_pp = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    groups.intra_dist_opt = parallel_state.get_intra_distributed_optimizer_instance_group()
    groups.ep = groups.expt_dp = parallel_state.get_expert_model_parallel_group()  # only this worker
    return groups
