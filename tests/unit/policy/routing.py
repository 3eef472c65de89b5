"""Loads of experts for simulations: made up, or from a recording."""

from __future__ import annotations

import random
from pathlib import Path

RECORDED = Path(__file__).parents[4] / "shared" / "data" / "routing" / "smartmoe_32e.npz"
"""``tokens[334, 24 layers, 32 experts]``: loads of every tenth iteration of a training (SmartMoE, ATC 2023)."""


def made_up(iterations: int, layers: int, experts: int, seed: int = 0) -> list[dict[int, list[int]]]:
    """By iteration and layer the tokens of each expert; some are far more popular than others, and that drifts."""
    draw = random.Random(seed)
    weights = {layer: [draw.paretovariate(1) for _ in range(experts)] for layer in range(layers)}
    trace = []
    for _ in range(iterations):
        for row in weights.values():
            row[draw.randrange(experts)] = draw.paretovariate(1)
        trace.append({layer: [int(4096 * w / sum(row)) for w in row] for layer, row in weights.items()})
    return trace


def recorded(layers: int) -> list[dict[int, list[int]]]:
    """The first layers of the recording; each of its iterations stands for the ten that follow."""
    import numpy as np

    with np.load(RECORDED, allow_pickle=False) as file:
        rows = file["tokens"][:, :layers].tolist()
    return [dict(enumerate(row)) for row in rows for _ in range(10)]
