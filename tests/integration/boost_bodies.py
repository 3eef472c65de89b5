"""What workers of a test's world do: they count by themselves which tokens experts process."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron.pretraining import loop
from tests.integration import bodies


def train(flags: dict) -> dict:
    """As ``bodies.train``; also what this worker has processed and sent, by layer and expert.

    Returns:
        ``processed``: tokens that its own experts were given, by all workers;
        ``beyond``: tokens that it sent to an expert beyond its capacity;
        ``fullest``: the most tokens that its experts of a layer processed at once, as a share of all their slots.
    """
    told = {"processed": defaultdict(int), "beyond": defaultdict(int), "fullest": 0.0}
    run_loop = loop.train

    def watched(run, stop):
        for chunk in run.stepper.chunks:
            for layer in (module for module in chunk.modules() if isinstance(module, MoELayer)):
                _watch(layer, told)
        return run_loop(run, stop)

    loop.train = watched
    return bodies.train(flags) | told


def _watch(layer: MoELayer, told: dict) -> None:
    config, number = layer.config, layer.layer_number - 1
    routers = config.expert_model_parallel_size

    def capacity(tokens: int) -> int:
        return math.ceil(tokens * config.moe_router_topk / config.num_moe_experts * config.moe_expert_capacity_factor)

    def route(router, inputs, output):
        tokens = output[1].sum(dim=0).tolist()
        layer.slots = capacity(len(output[1])) * routers * len(layer.local_expert_indices)
        if torch.is_grad_enabled() and router.training:
            for expert, count in enumerate(tokens):
                told["beyond"][f"{number} {expert}"] += max(0, count - capacity(len(output[1])))

    def process(experts, inputs):
        tokens = inputs[1].tolist()
        told["fullest"] = max(told["fullest"], sum(tokens) / layer.slots)
        if torch.is_grad_enabled() and experts.training:
            for expert, count in zip(layer.local_expert_indices, tokens, strict=True):
                told["processed"][f"{number} {expert}"] += count

    layer.router.register_forward_hook(route)
    layer.experts.register_forward_pre_hook(process)
