"""Summarizes samples as means over seeds, a table, and sentences with further figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from benchmarks import common
from benchmarks.accuracy.cells import EXPERTS, Cell, Plan, cells, expected

WIDTH = 110  # columns of the table


def cell_of(sample: dict, kind: type[Cell] = Cell) -> Cell:
    """Returns the cell of a sample, also of one read from JSON."""
    names = {field.name for field in fields(kind)}
    values: dict[str, Any] = {name: value for name, value in sample.items() if name in names}
    return kind(**{**values, "faults": tuple(sample["faults"])})


def summary(samples: Iterable[dict], plan: Plan) -> list[dict]:
    """Returns means over seeds, one row per cell, in the order of :func:`cells`.

    Differences are relative to the lossless run with the same seed and number of workers: the baseline for curves,
    otherwise the run without faults. They are None without such a run.

    Returns:
        ``cell`` (its name), ``kind``, ``seeds``; means ``loss`` (nats per token) and ``plt``; ``expected_plt`` or None;
        ``difference``: mean difference in loss, with ``lowest`` and ``highest``.
    """
    samples = list(samples)
    lossless = {(s["kind"], s["seed"]): s["loss"] for s in samples if s["kind"] == "fault-free"}
    lossless |= {("grid", seed): loss for (_, seed), loss in lossless.items()}
    lossless |= {("curve", s["seed"]): s["loss"] for s in samples if s["method"] == "baseline"}
    groups: dict[tuple[str, str], list[dict]] = {}
    for sample in samples:
        groups.setdefault((sample["kind"], cell_of(sample).name), []).append(sample)
    order = dict.fromkeys((cell.kind, cell.name) for cell in cells(plan, seed=0))
    return [_row(name, groups[kind, name], lossless, plan) for kind, name in order if (kind, name) in groups]


def _row(name: str, group: list[dict], lossless: dict[tuple[str, int], float], plan: Plan) -> dict:
    pairs = [(s["loss"], lossless.get((s["kind"], s["seed"]))) for s in group]
    differences = [loss - other for loss, other in pairs if other is not None]
    return {
        "cell": name,
        "kind": group[0]["kind"],
        "seeds": len(group),
        "plt": statistics.mean(s["plt"] for s in group),
        "expected_plt": expected(cell_of(group[0]), plan),
        "loss": statistics.mean(s["loss"] for s in group),
        "difference": statistics.mean(differences) if differences else None,
        "lowest": min(differences, default=None),
        "highest": max(differences, default=None),
    }


def yardsticks(samples: list[dict]) -> dict:
    """Returns reference values for the differences; None where samples are missing.

    Returns:
        ``spread_over_seeds``: standard deviation over seeds of the loss without faults; ``layout``: largest difference
        in loss between the curves' baseline (two workers) and the run without faults (one worker), both lossless;
        ``full_is_exact``: runs that save all experts end with exactly the loss of the run without faults;
        ``correlation``: Pearson correlation of PLT and the difference in loss over all lossy runs of the grid.
    """
    free = {s["seed"]: s["loss"] for s in samples if s["kind"] == "fault-free"}
    layouts = [abs(s["loss"] - free[s["seed"]]) for s in samples if s["method"] == "baseline" and s["seed"] in free]
    grid = [s for s in samples if s["kind"] == "grid" and s["seed"] in free]
    full, lossy = ([s for s in grid if (s["k"] == EXPERTS) is wanted] for wanted in (True, False))
    return {
        "spread_over_seeds": statistics.stdev(free.values()) if len(free) > 1 else None,
        "layout": max(layouts, default=None),
        "full_is_exact": all(s["loss"] == free[s["seed"]] for s in full) if full else None,
        "correlation": _correlation([(s["plt"], s["loss"] - free[s["seed"]]) for s in lossy]),
    }


def _correlation(pairs: list[tuple[float, float]]) -> float | None:
    varied = all(len(set(values)) > 1 for values in zip(*pairs, strict=True))
    return statistics.correlation(*zip(*pairs, strict=True)) if pairs and varied else None


def deviations(samples: Iterable[dict], plan: Plan) -> list[float]:
    """Returns the relative deviation from the expected PLT, for each sample with an expected loss of tokens."""
    pairs = [(sample["plt"], expected(cell_of(sample), plan)) for sample in samples]
    return [plt / told - 1 for plt, told in pairs if told]


def table(rows: list[dict]):
    """Returns the table of all cells for a console."""
    cells = []
    for row in rows:
        told = "-" if row["expected_plt"] is None else f"{row['expected_plt']:.2%}"
        spread = "-" if row["lowest"] is None else f"{row['lowest']:+.4f} .. {row['highest']:+.4f}"
        difference = "-" if row["difference"] is None else f"{row['difference']:+.4f}"
        figures = [str(row["seeds"]), f"{row['plt']:.2%}", told, f"{row['loss']:.4f}", difference, spread]
        cells.append([row["cell"], *figures])
    columns = ["run", "seeds", "PLT", "expected", "validation loss", "difference", "lowest .. highest"]
    title = "Means over seeds; differences in loss are from the run that lost nothing"
    return common.table(title, columns, cells)


def lines(samples: list[dict], plan: Plan, entropy: float) -> list[str]:
    """Returns the results outside the table, as lines."""
    sticks, off = yardsticks(samples), deviations(samples, plan)
    exactly = "to the last bit" if sticks["full_is_exact"] else "NOT exactly"
    sentences = {
        "spread_over_seeds": "spread over seeds without a fault (standard deviation): {:.4f}",
        "layout": "with nothing lost, but two workers in place of one: at most {:.4f} off",
        "full_is_exact": f"loss at the end with all experts saved: {exactly} that without a fault",
        "correlation": "correlation of PLT with the difference in loss: {:.2f}",
    }
    said = [f"unigram entropy of the text: {entropy:.3f} nats a token"]
    said += [words.format(sticks[name]) for name, words in sentences.items() if sticks[name] is not None]
    if off:
        said.append(f"PLT relative to the estimate for equally busy experts: {min(off):+.1%} to {max(off):+.1%}")
    return said
