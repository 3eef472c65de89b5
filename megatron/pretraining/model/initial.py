"""Initializes weights independently of the layout."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from megatron.pretraining.config import ConfigError
from megatron.pretraining.model.parameters import foreign_tensors, unpartitioned_parameters, unwrap

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
    """Returns the function by which megatron-core initialises a parameter."""
    if "linear_proj.weight" in name or "linear_fc2.weight" in name:
        return core_config.output_layer_init_method
    if name.startswith("embedding.") or (core_config.use_mup and name.startswith("output_layer.")):
        return core_config.embedding_init_method
    return core_config.init_method


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
