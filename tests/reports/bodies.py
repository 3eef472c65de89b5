"""What workers of :mod:`tests.reports` do."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron.pretraining.entry import gpt, log
from megatron.pretraining.model.corrections import widen_counters
from tests.integration.bodies import train

_finalize = import_module("megatron.core.distributed.finalize_model_grads")  # a function has the same name


def counting_train(flags: dict) -> list:
    """Trains; returns the exact counts, and the signs of the steps of biases, of each layer and iteration."""
    exact, steps, route, update = {}, [], TopKRouter.forward, _finalize.get_updated_expert_bias

    def counted(router, *inputs, **options):
        output = route(router, *inputs, **options)
        if torch.is_grad_enabled():
            tokens = output[1].sum(dim=0)
            exact[router.layer_number] = exact.get(router.layer_number, 0) + tokens
        return output

    def updated(tokens, bias, *more, **options):
        biases = update(tokens, bias, *more, **options)
        for (_, counts), before, after in zip(sorted(exact.items()), bias, biases, strict=True):
            torch.distributed.all_reduce(counts)
            steps.append([counts.tolist(), torch.sign(after - before).int().tolist()])
        exact.clear()
        return biases

    TopKRouter.forward, _finalize.get_updated_expert_bias = counted, updated
    assert train(flags)["code"] == 0
    return steps


def counting_loads(flags: dict) -> list:
    """Trains; returns the exact counts of each layer, and its maximum violation in the last report."""
    exact, reported, route, fields = {}, {}, TopKRouter.forward, log.fields_of

    def counted(router, *inputs, **options):
        output = route(router, *inputs, **options)
        if torch.is_grad_enabled():
            exact[router.layer_number] = exact.get(router.layer_number, 0) + output[1].sum(dim=0)
        return output

    def noted(load):
        reported.update(load.violations)
        return fields(load)

    TopKRouter.forward, log.fields_of = counted, noted
    assert train(flags)["code"] == 0
    return [[row.tolist() for _, row in sorted(exact.items())], [value for _, value in sorted(reported.items())]]


def train_with_samples(flags: dict) -> dict:
    """Trains; returns step records, and the tokens with labels of each micro batch."""
    samples, real = [], gpt.forward_step

    def noting(batches, model):
        batch = next(batches)
        samples.append([batch["tokens"].tolist(), batch["labels"].tolist()])
        return real(iter([batch]), model)

    gpt.forward_step = noting
    return {"records": train(flags)["records"], "samples": samples}


def signs_of_steps(counts: list[int]) -> list[list[int]]:
    """Signs of megatron-core's steps of biases, with corrected counters and with fp32."""
    torch.distributed.init_process_group("gloo")
    group, signs = torch.distributed.group.WORLD, []
    tokens = torch.tensor(counts, dtype=torch.float32)
    router = SimpleNamespace(local_tokens_per_expert=tokens.clone(), global_tokens_per_expert=None, ga_steps=None)
    widen_counters([router])
    for counter in (router.local_tokens_per_expert, tokens):
        bias = _finalize.get_updated_expert_bias(counter, torch.zeros(len(counts)), 0.1, tp_dp_cp_group=group)
        signs.append(torch.sign(bias).int().tolist())
    return signs
