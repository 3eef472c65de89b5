"""The parameters of a model chunk by their names and places in the unpartitioned model.

megatron-core's ``sharded_state_dict`` describes every local tensor as a box of a global one.  This module requests a
description in which each layer, expert and half of a gated linear layer is a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule

from moc.state.fragments import Piece
from moc.state.region import Region

Pieces = dict[torch.Tensor, list[Piece]]

_ONE_TENSOR_PER_LAYER_AND_EXPERT = {"singleton_local_shards": True}


def unwrap(module: torch.nn.Module) -> MegatronModule:
    """The bare model inside of data-parallel and mixed-precision wrappers."""
    inner: Any = module
    while hasattr(inner, "module"):
        inner = inner.module
    return inner


def unpartitioned_parameters(model: MegatronModule) -> dict[str, list[Piece]]:
    """The pieces of every parameter of a bare megatron-core chunk, by local name, in ascending ``start``.

    A parameter that is marked as ``unused``, in a slot for an expert that holds none, has no pieces.

    Raises:
        ValueError: megatron-core does not describe a parameter.
    """
    described = _described(model)
    pieces = {}
    for name, parameter in model.named_parameters():
        if name not in described and not getattr(parameter, "unused", False):
            raise ValueError(f"megatron-core's sharded_state_dict does not describe the parameter {name}")
        pieces[name] = [_piece(t, parameter) for t in _tensors(described[name])] if name in described else []
    return pieces


def unpartitioned_buffers(model: MegatronModule) -> dict[str, list[Piece]]:
    """Describes, as :func:`unpartitioned_parameters` does, the buffers that megatron-core saves with the model."""
    described = _described(model)
    return {
        name: [_piece(t, buffer) for t in _tensors(described[name])]
        for name, buffer in model.named_buffers()
        if name in described
    }


def parameter_pieces(chunks: Sequence[torch.nn.Module]) -> Pieces:
    """The pieces of each parameter of the model chunks, in model order."""
    pieces: Pieces = {}
    for model in map(unwrap, chunks):
        described = unpartitioned_parameters(model)
        pieces |= {parameter: described[name] for name, parameter in model.named_parameters()}
    return pieces


def buffer_pieces(chunks: Sequence[torch.nn.Module]) -> Pieces:
    """The pieces of each buffer trained without the optimizer: the routers' expert-balancing biases."""
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


def _piece(tensor: ShardedTensor, parameter: torch.Tensor) -> Piece:
    assert tensor.data is not None  # sharded_state_dict describes live tensors
    view, replica = tensor.data.detach(), cast(tuple, tensor.replica_id)
    return Piece(
        name=tensor.key,
        global_shape=tuple(tensor.global_shape),
        region=Region(tuple(tensor.global_offset), (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)),
        view=view,
        start=int(view.storage_offset() - parameter.storage_offset()),
        replica=tuple(replica),
        padded=tensor.allow_shape_mismatch,
    )
