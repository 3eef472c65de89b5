"""Describes and initializes the parameters of a model chunk by name and position in the unpartitioned model.

megatron-core's ``sharded_state_dict`` describes every local tensor as a chunk of a global one.  This module requests a
description in which each layer, expert and half of a gated linear layer is a separate tensor.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule

from megatron.pretraining.config import ConfigError
from moc.state.operators import Piece, Region, is_known

Pieces = dict[torch.Tensor, list[Piece]]

_ONE_TENSOR_PER_LAYER_AND_EXPERT = {"singleton_local_shards": True}


def unwrap(module: torch.nn.Module) -> MegatronModule:
    """Returns the bare model inside data-parallel and mixed-precision wrappers."""
    inner: Any = module
    while hasattr(inner, "module"):
        inner = inner.module
    return inner


def unpartitioned_parameters(model: MegatronModule) -> dict[str, list[Piece]]:
    """Returns the chunks of every parameter of a bare megatron-core model chunk, by local name, in ascending ``start``.

    A parameter that is marked as ``unused``, in an expert slot without an expert, has no chunks.

    Raises:
        ValueError: megatron-core does not describe a parameter.
    """
    described, layers = _described(model), _num_layers(model)
    pieces = {}
    for name, parameter in model.named_parameters():
        if name not in described and not getattr(parameter, "unused", False):
            raise ValueError(f"megatron-core's sharded_state_dict does not describe the parameter {name}")
        pieces[name] = [_piece(t, parameter, layers) for t in _tensors(described[name])] if name in described else []
    return pieces


def unpartitioned_buffers(model: MegatronModule) -> dict[str, list[Piece]]:
    """Describes the buffers that megatron-core saves with the model, as :func:`unpartitioned_parameters` does."""
    described, layers = _described(model), _num_layers(model)
    return {
        name: [_piece(t, buffer, layers) for t in _tensors(described[name])]
        for name, buffer in model.named_buffers()
        if name in described
    }


def foreign_tensors(model: MegatronModule) -> list[str]:
    """Returns the parameters of a bare model chunk that GPT models lack, by name in the unpartitioned model."""
    described, layers = _described(model), _num_layers(model)
    names = [t.key for name, _ in model.named_parameters() if name in described for t in _tensors(described[name])]
    return [name for name in names if not is_known(_with_depth_as_layer(name, layers))]


def parameter_pieces(chunks: Sequence[torch.nn.Module]) -> Pieces:
    """Returns the chunks of each parameter of the model chunks, in model order."""
    pieces: Pieces = {}
    for model in map(unwrap, chunks):
        described = unpartitioned_parameters(model)
        pieces |= {parameter: described[name] for name, parameter in model.named_parameters()}
    return pieces


def buffer_pieces(chunks: Sequence[torch.nn.Module]) -> Pieces:
    """Returns the chunks of each buffer trained without the optimizer: the routers' expert-balancing biases."""
    pieces: Pieces = {}
    for model in map(unwrap, chunks):
        buffers = dict(model.named_buffers())
        pieces |= {buffers[name]: described for name, described in unpartitioned_buffers(model).items()}
    return pieces


def _described(model: MegatronModule) -> dict:
    return model.sharded_state_dict(metadata=dict(_ONE_TENSOR_PER_LAYER_AND_EXPERT))


def _tensors(entry: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    if isinstance(entry, ShardedTensorFactory):
        built = entry.build()
        return list(built.values() if isinstance(built, dict) else built)
    return [entry]


def known_name(name: str, num_layers: int) -> str:
    """Returns the name under which an operator holds a tensor.

    Names of GPT's layers do not change.  A depth of multi-token prediction (MTP) is a layer after the others.  Any
    other part of a layer, such as a Mamba mixer or a user's module, belongs to the layer's attention, the operator that
    mixes tokens.  Any other part of the model belongs to the output.

    Args:
        name: megatron-core's name in the unpartitioned model.
        num_layers: layers of the decoder.
    """
    name = _with_depth_as_layer(name, num_layers)
    if is_known(name):
        return name
    if layer := _LAYER.match(name):
        return f"{layer[0]}self_attention.{name[layer.end() :]}"
    return f"output_layer.{name}"


def _with_depth_as_layer(name: str, num_layers: int) -> str:
    depth = _MTP_DEPTH.match(name)
    if depth is None:
        return name
    part = name[depth.end() :] if depth["layer"] else f"mtp.{name[depth.end() :]}"
    return f"decoder.layers.{num_layers + int(depth['depth'])}.{part}"


_MTP_DEPTH = re.compile(r"mtp\.layers\.(?P<depth>\d+)\.(?P<layer>(?:mtp_model_layer|transformer_layer)\.)?")
_LAYER = re.compile(r"decoder\.layers\.\d+\.")


def _num_layers(model: torch.nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    return getattr(config, "num_layers", None) or 0


def _piece(tensor: ShardedTensor, parameter: torch.Tensor, num_layers: int) -> Piece:
    assert tensor.data is not None  # sharded_state_dict describes live tensors
    view, replica = tensor.data.detach(), cast(tuple, tensor.replica_id)
    return Piece(
        name=known_name(tensor.key, num_layers),
        global_shape=tuple(tensor.global_shape),
        region=Region(tuple(tensor.global_offset), (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)),
        view=view,
        start=int(view.storage_offset() - parameter.storage_offset()),
        replica=tuple(replica),
        padded=tensor.allow_shape_mismatch,
    )


EXACT = "exact"
"""Value of ``--initialization`` that selects these weights."""


def initialize_weights(chunk: torch.nn.Module, seed: int) -> None:
    """Initialises each matrix and router bias only from (seed, name in the unpartitioned model).

    The model's configuration defines the distributions (``init_method`` and others).  Norms and other biases keep
    the values of their modules.  The same model therefore starts identical in every layout, and a stage can be
    initialised without its neighbours.

    Args:
        chunk: model chunk of this worker; its tensors have memory.
        seed: seed of all random numbers.

    Raises:
        ConfigError: a part of the model initialises itself, so that its values depend on the layout.
    """
    model: Any = unwrap(chunk)
    if foreign := foreign_tensors(model):
        raise ConfigError(
            f"--initialization exact cannot initialise {foreign[0]}, which GPT models do not have. Fix: "
            "--initialization stock",
            code="initialization-unsupported",
        )
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for name, pieces in unpartitioned_parameters(model).items():
            initialize = _method_of(name, model.config)
            for piece in pieces:
                if len(piece.global_shape) < 2 and not name.endswith("router.bias"):
                    continue
                torch.default_generator.manual_seed(_seed_of(seed, piece.name))
                values = torch.empty(piece.global_shape, device="cpu")
                initialize(values)
                piece.view.copy_(values[piece.region.slices()].view(piece.view.shape))


def _method_of(name: str, core_config: Any) -> Callable[[torch.Tensor], object]:
    """Returns megatron-core's function to initialise a parameter."""
    if "linear_proj.weight" in name or "linear_fc2.weight" in name:
        return core_config.output_layer_init_method
    if name.startswith("embedding.") or (core_config.use_mup and name.startswith("output_layer.")):
        return core_config.embedding_init_method
    return core_config.init_method


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
