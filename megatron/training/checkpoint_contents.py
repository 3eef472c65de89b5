"""What a checkpoint holds: the weights' description for megatron-core, and ``training_state.json``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.training.config import Config, global_batch_size, train_iterations
from megatron.training.initialize import World
from megatron.training.optimizer import VotedOptimizer
from moc.state.optimizer import get_step, members
from moc.state.parameters import unwrap

_SHAPE = {  # what must be the same for weights to fit, by flag group
    "network": ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
                "kv_channels", "position_embedding_type", "normalization", "swiglu", "add_bias_linear",
                "untie_embeddings_and_output_weights", "qk_layernorm"),
    "moe": ("num_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
}  # fmt: skip


@dataclass(frozen=True)
class Position:
    """How far a run has come; iterations and samples completed, and of these iterations those skipped."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0


def described_weights(chunks: list[DistributedDataParallel]) -> dict:
    """The model chunks as megatron-core's sharded state dict, under Megatron-LM's keys."""
    models = [unwrap(chunk).sharded_state_dict() for chunk in chunks]
    if len(models) == 1:
        return {"model": models[0]}
    return {f"model{i}": model for i, model in enumerate(models)}


def training_state(
    config: Config, world: World, position: Position, optimizer: VotedOptimizer, scheduler: OptimizerParamScheduler
) -> dict:
    """The content of ``training_state.json``."""
    scalers = [m.grad_scaler for m in members(optimizer.core) if getattr(m, "grad_scaler", None)]
    return {
        **asdict(position),
        "optimizer": config.regularization.optimizer if config.checkpoint.save_optim else None,
        "optimizer_step": get_step(optimizer.core),
        "scheduler": scheduler.state_dict(),
        "grad_scaler": _plain(scalers[0].state_dict()) if scalers else None,
        "shape": shape(config),
        "sample_order": sample_order(config, world),
    }


def restore_grad_scaler(optimizer: VotedOptimizer, saved: dict | None) -> None:
    """Gives fp16's loss scale its saved value and history."""
    for member in members(optimizer.core):
        if saved and getattr(member, "grad_scaler", None):
            member.grad_scaler.load_state_dict({**saved, "scale": torch.tensor(saved["scale"])})


def shape(config: Config) -> dict:
    """What must be equal for weights to fit, by flag name; values as JSON gives them back."""
    groups = {group: getattr(config, group) for group in _SHAPE}
    values = {name: getattr(groups[group], name) for group, names in _SHAPE.items() for name in names}
    return json.loads(json.dumps(values))


def sample_order(config: Config, world: World) -> dict:
    """What the order of samples depends on; megatron-core shuffles all epochs of a run together."""
    data, batch = config.data, global_batch_size(config, world.size)
    order = {
        "seed": config.rng.seed,
        "train_samples": train_iterations(config, world.size) * batch,
        "seq_length": data.seq_length,
        "split": data.split,
    }
    return order | {name: list(getattr(data, name) or ()) for name in ("data_path", "train_data_path")}


def _plain(state: dict) -> dict:
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
