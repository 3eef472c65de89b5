"""Splits a model into pipeline stages; its layers need not divide evenly."""

from __future__ import annotations

from collections.abc import Sequence

from moc.simulate.errors import SimulationError
from moc.state.operators import Operator


def split_stages(operators: Sequence[Operator], stages: int) -> list[list[Operator]]:
    """Returns the operators of each stage: contiguous layers, split evenly, the embedding first, the output last.

    If the layers do not divide evenly, the middle stages hold one more, since the first and the last also have
    embedding and output.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    layers = 1 + max((o.layer for o in operators if o.layer is not None), default=-1)
    if layers < stages:
        raise SimulationError(
            f"{layers} layers cannot fill {stages} pipeline stages. Fix: take fewer stages",
            code="stages-exceed-layers",
        )
    base, more = divmod(layers, stages)
    first = (stages - more) // 2
    counts = [base + (first <= stage < first + more) for stage in range(stages)]
    of_layer = [stage for stage, count in enumerate(counts) for _ in range(count)]
    split: list[list[Operator]] = [[] for _ in range(stages)]
    for operator in operators:
        if operator.layer is not None:
            split[of_layer[operator.layer]].append(operator)
        else:
            split[-1 if operator.kind == "output" else 0].append(operator)
    return split
