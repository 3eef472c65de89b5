"""The operators of a model that is built in one process on torch's meta device, without memory for its parameters."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]  # public, but not in __all__

from megatron.pretraining.entry.configuration import MegatronConfig
from megatron.pretraining.entry.flags import refusal_of
from megatron.pretraining.entry.model import operators_of_parameters, tensors_in
from megatron.pretraining.entry.offline import kept_environment
from megatron.pretraining.entry.stock import replaced
from megatron.pretraining.model.parameters import parameter_pieces
from moc.state.operators import Operator

_SINGLE_WORKER = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "context_parallel_size": 1,
    "hierarchical_context_parallel_sizes": None,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "tensor_parallel_num_weight_shards": None,
    "expert_tensor_parallel_num_weight_shards": None,
    "defer_embedding_wgrad_compute": False,
    "overlap_moe_expert_parallel_comm": False,
    "delay_wgrad_compute": False,
    "tp_comm_overlap": False,
}
"""Megatron-LM's arguments of an unpartitioned model."""
_WITHOUT_KERNELS = {
    "transformer_impl": "local",  # layers of Transformer Engine allocate GPU memory
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_enable_deepep": False,
    "window_size": None,
    "fp8": None,
    "fp4": None,
    "perform_initialization": False,
    "use_cpu_initialization": False,
    "init_model_with_meta_device": False,
}
"""Arguments of a model's computation and initialization, which do not change its parameters."""


def operators_on_meta(config: MegatronConfig, rows: int) -> tuple[Operator, ...]:
    """Returns every operator of the unpartitioned model, in the order of the forward pass.

    Args:
        config: configuration of any model that Megatron-LM's flags describe.
        rows: rows of the embedding, including padding.

    Raises:
        ConfigError: Megatron-LM cannot build the model without CUDA.
    """
    arguments = copy.copy(config.arguments)
    vars(arguments).update(_SINGLE_WORKER | _WITHOUT_KERNELS | {"padded_vocab_size": rows})
    config_of_args: Any = hybrid_config_from_args if arguments.hybrid_layer_pattern else gpt_config_from_args
    with (
        kept_environment(),
        _single_worker_groups() as groups,
        replaced(torch.cuda, current_device=lambda: torch.device("meta")),
    ):
        try:
            model_config = config_of_args(arguments)
            chunk = model_config.get_builder_cls()(model_config).build_model(groups)
        except Exception as error:
            raise refusal_of(error) from error
        return operators_of_parameters(tensors_in(parameter_pieces([chunk]), stage=0))


@contextlib.contextmanager
def _single_worker_groups() -> Iterator[ProcessGroupCollection]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        yield ProcessGroupCollection.use_mpu_process_groups()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
