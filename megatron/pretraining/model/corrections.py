"""Corrects results of megatron-core that depend on precision or layout: see ``docs/reference/corrections.md``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from megatron.pretraining.config.flag import refuse
from megatron.pretraining.model.parameters import unwrap

_GLOBAL = "global_aux_loss"


@dataclass(frozen=True)
class PaddedVocabulary:
    """Rows of the embedding.

    Attributes:
        size: tokens of the tokenizer.
        rows: rows, including padding.
    """

    size: int
    rows: int


@dataclass(frozen=True)
class Defect:
    """A defect that the results of this run have without its correction.

    Attributes:
        name: name of the correction.
        effect: the effect, as a sentence without a period; empty if it is improbable.
        correct: corrects this worker's part of the model.
    """

    name: str
    effect: str
    correct: Callable[[], None]


def defects_of(chunks: Sequence[torch.nn.Module], vocabulary: PaddedVocabulary, replicas: int) -> Iterator[Defect]:
    """Yields the defects of a model, which are the same on all workers.

    Args:
        chunks: built model chunks of this worker.
        vocabulary: rows of the embedding.
        replicas: number of data-parallel replicas.
    """
    core: Any = unwrap(chunks[0]).config
    routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
    is_global = core.num_moe_experts and _GLOBAL in as_list(core.moe_router_load_balancing_type)
    if is_global or core.num_moe_experts and core.moe_router_enable_expert_bias:
        dtype = str(core.params_dtype).removeprefix("torch.")
        effect = f"routers count tokens in {dtype}, which rounds: expert biases can move in the wrong direction"
        yield Defect(
            "expert-counters",
            "" if core.params_dtype == torch.float32 else effect,
            partial(widen_counters, routers),
        )
    if is_global and replicas > 1:
        yield Defect(
            "global-aux-loss",
            f"gradients of global_aux_loss are divided by the {replicas} data-parallel replicas",
            partial(scale_global_loss, routers, replicas),
        )
    if vocabulary.rows > vocabulary.size:
        yield Defect(
            "vocabulary-padding",
            f"the softmax includes {vocabulary.rows - vocabulary.size} rows of padding, so that the loss depends on "
            "--tensor-model-parallel-size",
            partial(mask_padding, chunks, vocabulary),
        )


def as_list(value: Any) -> list[Any]:
    """Returns a value of a flag that has one value or several as a list."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def widen_counters(routers: Iterable[TopKRouter]) -> None:
    """Makes the counts of routers exact; call it after the model was converted to its precision.

    megatron-core compares the counts with their mean.  In fp64, the sign of the difference is exact for up to 2**53
    tokens; in fp32 the sum of the counts rounds above 2**24.
    """
    for router in routers:
        for name, dtype in (
            ("local_tokens_per_expert", torch.float64),
            ("global_tokens_per_expert", torch.float32),
            ("ga_steps", torch.float32),
        ):
            counter = getattr(router, name)
            if counter is not None:
                counter.data = counter.data.to(dtype)


def scale_global_loss(routers: Iterable[TopKRouter], replicas: int) -> None:
    """Multiplies the coefficient of ``global_aux_loss``, which ``TopKRouter.get_aux_loss_coeff`` reads.

    Each replica has a part of the loss, and megatron-core averages their gradients instead of adding them.  It
    divides the reported loss by the coefficient, so that the report does not change.
    """
    for config in {id(router.config): router.config for router in routers}.values():
        kinds, coefficients = as_list(config.moe_router_load_balancing_type), as_list(config.moe_aux_loss_coeff)
        scaled = [c * replicas if kind == _GLOBAL else c for kind, c in zip(kinds, coefficients, strict=True)]
        is_list = isinstance(config.moe_router_load_balancing_type, list)
        config.moe_aux_loss_coeff = scaled if is_list else scaled[0]


def mask_padding(chunks: Iterable[torch.nn.Module], vocabulary: PaddedVocabulary) -> None:
    """Excludes the rows of padding from the softmax, by a hook of the output layer.

    Raises:
        ConfigError: the last stage of the model has no ``output_layer``, as ``GPTModel`` has.
    """
    for chunk in chunks:
        model: Any = unwrap(chunk)
        if not getattr(model, "post_process", False):
            continue
        layer: Any = getattr(model, "output_layer", None)
        refuse(
            layer is None,
            f"--correct vocabulary-padding needs an output_layer, which {type(model).__name__} does not have. Fix: "
            "pass --correct without vocabulary-padding",
            code="correction-unsupported",
        )
        layer.register_forward_hook(partial(_mask, vocabulary))


def _mask(vocabulary: PaddedVocabulary, layer: torch.nn.Module, inputs: Any, output: tuple[torch.Tensor, Any]) -> None:
    """Overwrites the logits of padding; the gradient of the softmax is 0 there."""
    logits = output[0].detach()
    width = logits.shape[-1]
    first = 0 if width == vocabulary.rows else width * parallel_state.get_tensor_model_parallel_rank()
    logits[..., max(vocabulary.size - first, 0) :] = torch.finfo(logits.dtype).min
