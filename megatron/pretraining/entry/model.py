"""Finds the operators of a model in its built chunks, for any model of Megatron-LM and any user's layers."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from megatron.pretraining.engine.megatron import Model
from megatron.pretraining.engine.owned import MASTER, owned_slices
from megatron.pretraining.entry.previous import check_flags, described_by_flags
from megatron.pretraining.model.parameters import Pieces, parameter_pieces
from moc.files.decode import short_repr
from moc.runtime.collectives import gather
from moc.runtime.job import World
from moc.state.operators import Operator, operator_of
from moc.store.errors import CheckpointError

_KINDS = ("embedding", "attention", "mlp", "router", "expert", "output")


class ModelParameter(NamedTuple):
    """A parameter of the unpartitioned model.

    Attributes:
        name: name in its operator.
        numel: number of elements.
        sliced: whether tensor parallelism slices it; norms, routers and learned positions are replicated.
        stage: the pipeline stage that holds it.
        moments: the names of its optimizer's moments.
        per_row: elements of each row, if the layout determines the number of rows; otherwise 0.
    """

    name: str
    numel: int
    sliced: bool
    stage: int
    moments: tuple[str, ...]
    per_row: int = 0


def tensors_of(
    chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer, world: World
) -> tuple[list[ModelParameter], dict[str, tuple[str, ...]]]:
    """Returns this worker's parameters; and by name, the moments of parameters whose optimizer state it partly owns."""
    chunks_by_parameter = parameter_pieces(chunks)
    moments = {
        chunk.name: tuple(sorted(slot for slot in owned.slots if slot != MASTER))
        for owned in owned_slices(optimizer)
        for chunk in chunks_by_parameter[owned.parameter]
    }
    return tensors_in(chunks_by_parameter, world.pipeline_rank), moments


def tensors_in(chunks_by_parameter: Pieces, stage: int) -> list[ModelParameter]:
    """Returns the parameters of model chunks, with no moments filled in.

    Args:
        chunks_by_parameter: local chunks of each parameter.
        stage: the pipeline stage that holds the chunks.
    """
    return [
        ModelParameter(
            chunk.name,
            math.prod(chunk.global_shape),
            getattr(parameter, "tensor_model_parallel", False),
            stage,
            (),
            math.prod(chunk.global_shape[1:]) if chunk.padded else 0,
        )
        for parameter, local_chunks in chunks_by_parameter.items()
        for chunk in local_chunks
    ]


def model_of_chunks(
    chunks: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    world: World,
    arguments: Mapping,
    masks_padding: bool = False,
) -> Model:
    """Returns the model, assembled from the parts that the workers have built; a collective call.

    Args:
        chunks: model chunks of this worker.
        optimizer: optimizer of this worker.
        world: ranks of this worker.
        arguments: Megatron-LM's arguments, for people and converters.
        masks_padding: a checkpoint may have more or fewer rows of padding.
    """
    gathered = gather(tensors_of(chunks, optimizer, world))
    moments = {name: slots for _, of_rank in gathered for name, slots in of_rank.items()}
    tensors = {
        tensor.name: tensor._replace(moments=moments.get(tensor.name, ()))
        for parameters, _ in reversed(gathered)
        for tensor in parameters
    }
    operators = operators_of_parameters(tensors.values())
    shape = {operator.name: operator.parameters for operator in operators}
    per_row: Counter[str] = Counter()
    for tensor in tensors.values():
        per_row[operator_of(tensor.name)] += tensor.per_row

    def check(state: Mapping, where: object) -> None:
        saved, extra_rows = state["shape"], more_padding(arguments, state.get("model") or {}) if masks_padding else 0
        if described_by_flags(saved):
            check_flags(arguments, saved, where)
        else:
            check_shape(with_rows(shape, per_row, extra_rows), saved, where)

    return Model(
        operators=operators,
        stages=stages_of(tensors.values()),
        described={"shape": shape, "model": dict(arguments), "tokenizer": tokenizer_of(arguments)},
        check=check,
    )


def tokenizer_of(described: Mapping) -> dict[str, str | None]:
    """Returns the type of the tokenizer in Megatron-LM's arguments, and the absolute path of its file, or its name."""
    model = described.get("tokenizer_model")
    return {
        "type": described.get("tokenizer_type"),
        "model": os.path.abspath(model) if model and os.path.exists(model) else model,
    }


def operators_of_parameters(tensors: Iterable[ModelParameter]) -> tuple[Operator, ...]:
    """Returns the operators that hold these tensors, in the order of the forward pass; pure."""
    parts_of_operator: dict[str, list[ModelParameter]] = {}
    for tensor in tensors:
        parts_of_operator.setdefault(operator_of(tensor.name), []).append(tensor)
    moments_differ = len({tensor.moments for parts in parts_of_operator.values() for tensor in parts}) > 1
    return tuple(
        sorted(
            (_operator(name, parts, moments_differ) for name, parts in parts_of_operator.items()), key=_forward_position
        )
    )


def stages_of(tensors: Iterable[ModelParameter]) -> tuple[int, ...]:
    """Returns the pipeline stage of each layer; a layer without parameters is on the previous layer's stage; pure."""
    stages: dict[int, int] = {}
    for tensor in tensors:
        words = operator_of(tensor.name).split(".")
        if words[0] == "layers":
            stages[int(words[1])] = tensor.stage
    stage_of_layer: list[int] = []
    for layer in range(1 + max(stages, default=-1)):
        stage_of_layer.append(stages.get(layer, stage_of_layer[-1] if stage_of_layer else 0))
    return tuple(stage_of_layer)


def more_padding(arguments: Mapping, saved: Mapping) -> int:
    """Returns the rows of padding that a saved model has in excess; 0 for another vocabulary.

    Args:
        arguments: arguments of this model, as values of JSON.
        saved: arguments of the saved model.
    """
    rows, stored = arguments.get("padded_vocab_size"), saved.get("padded_vocab_size")
    same_vocabulary = all(arguments.get(name) == saved.get(name) for name in ("tokenizer_type", "vocab_size"))
    return stored - rows if same_vocabulary and isinstance(rows, int) and isinstance(stored, int) else 0


def with_rows(shape: Mapping[str, int], per_row: Mapping[str, int], extra_rows: int) -> dict[str, int]:
    """Returns the shape of a model with ``extra_rows`` more rows; ``per_row`` has the elements of a row by operator."""
    return {name: count + extra_rows * per_row.get(name, 0) for name, count in shape.items()}


def check_shape(expected: Mapping[str, int], saved: Mapping, where: object) -> None:
    """Raises ``CheckpointError`` if a checkpoint holds another model than ``expected``: parameters by operator."""
    for name in sorted({*expected, *saved}):
        if expected.get(name) != saved.get(name):
            raise CheckpointError(
                f"{where} holds another model: {short_repr(name)} has {short_repr(saved.get(name, 0))} parameters "
                f"there, and {expected.get(name, 0)} here. Fix: pass the flags of that model, or another checkpoint",
                code="checkpoint-of-another-model",
            )


def _operator(name: str, parts: list[ModelParameter], moments_differ: bool) -> Operator:
    words, moments = name.split("."), None
    if moments_differ:
        elements_of_moment: dict[str, int] = {}
        for tensor in parts:
            for slot in tensor.moments:
                elements_of_moment[slot] = elements_of_moment.get(slot, 0) + tensor.numel
        moments = tuple(sorted(elements_of_moment.items()))
    total, unsliced = (
        sum(t.numel for t in parts if not t.sliced or include_sliced) for include_sliced in (True, False)
    )
    if words[0] != "layers":
        return Operator(name, words[0], None, None, total, unsliced, moments)
    expert = int(words[3]) if words[2] == "expert" else None
    return Operator(name, words[2], int(words[1]), expert, total, unsliced, moments)


def _forward_position(operator: Operator) -> tuple[int, int, int, int]:
    part = {"embedding": 0, "output": 2}.get(operator.kind, 1)
    return part, operator.layer or 0, _KINDS.index(operator.kind), operator.expert or 0
