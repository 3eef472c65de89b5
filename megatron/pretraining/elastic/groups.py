"""Process groups of elastic training."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.pretraining.config import Config

_domain: dist.ProcessGroup | None = None  # as megatron-core keeps its groups


def exchange_group() -> dist.ProcessGroup:
    """The workers that hold the experts of this pipeline stage: gradients and state of experts travel among them."""
    group: Any = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return group


def dispatch_group() -> dist.ProcessGroup:
    """The workers among which tokens travel: those of a domain of the exchange group, or all of it."""
    return _domain or exchange_group()


def dispatch_within(group: dist.ProcessGroup | None) -> None:
    """From now on, this worker dispatches tokens within a domain; None for all of the exchange group."""
    global _domain
    _domain = group


def gradient_groups(config: Config) -> ProcessGroupCollection | None:
    """The groups over which gradients are reduced and optimizers sharded; None for megatron-core's own.

    With ``--elastic``, experts are reduced and sharded over nobody: :mod:`megatron.pretraining.elastic.gradients` sums
    their gradients.
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
    groups.ep = groups.expt_dp = parallel_state.get_expert_model_parallel_group()  # this worker alone
    return groups
