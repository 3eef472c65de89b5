"""Checks values by layer and expert in the state of policies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moc.files.decode import StateError
from moc.state.operators import Operator


def experts_by_layer(operators: Iterable[Operator]) -> dict[int, int]:
    """Returns the number of experts by layer, ascending; only layers with experts."""
    return dict(sorted(Counter(one.place[0] for one in operators if one.place is not None).items()))


def check_tables(tables: Iterable[Mapping[int, Any]], num_experts: Mapping[int, int], of: str) -> None:
    """Checks that saved values by layer, or by layer and expert, include all layers and experts, or none.

    Raises:
        ValueError: a layer or an expert is missing, or there are too many.
    """
    for table in filter(None, tables):
        rows = {
            layer: len(row) if isinstance(row, Sequence) else num_experts.get(layer) for layer, row in table.items()
        }
        if rows != num_experts:
            raise StateError(
                f"this is no state of {of} of this model (its experts are others). Fix: start without it",
            )
