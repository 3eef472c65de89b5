"""Plots PLT and loss over the grid (MoC-System, Figure 5), and loss curves with faults (Figure 14(a))."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.accuracy.cells import Plan
from benchmarks.accuracy.report import summary, yardsticks
from moc.plots import add_legend, drawings, faint, ink

_COLOURS = {"baseline": "C6", "W": "C0", "O": "C2", "WO": "C1", "WO-2L": "C3"}
_WINDOW = 8  # iterations over which a training loss is averaged


def plot(samples: list[dict], plan: Plan, path: Path) -> None:
    """Draws all panels from the samples of the JSON file."""
    rows = {(row["kind"], row["cell"]): row for row in summary(samples, plan)}
    for figure, [above, below] in drawings(path, 2, 3, dpi=110, figsize=(18, 11)):
        _grid(above[0], plan, rows, "plt", "(a) lost tokens, % (PLT)", 100, "%.2f")
        _grid(above[1], plan, rows, "difference", "(b) validation loss - that without a fault, 1/1000", 1000, "%+.1f")
        _against_plt(above[2], samples)
        _curves(below[0], samples)
        _differences(below[1], samples)
        _selections(below[2], plan, rows)
        figure.suptitle("Accuracy with pec: lost tokens and validation loss")


def _grid(panel, plan: Plan, rows: dict, what: str, title: str, scale: float, form: str) -> None:
    values = [[rows.get(("grid", f"K={k} I={i} sequential"), {}).get(what) for i in plan.intervals] for k in plan.ks]
    numbers = [[float("nan") if v is None else v * scale for v in row] for row in values]
    limit = 1.5 * max((abs(n) for row in numbers for n in row if n == n), default=0.0) or 1.0  # pale, behind text
    colours, lowest = ("coolwarm", -limit) if what == "difference" else ("Reds", 0.0)
    panel.imshow(numbers, cmap=colours, vmin=lowest, vmax=limit, aspect="auto")
    for y, row in enumerate(numbers):
        for x, number in enumerate(row):
            panel.text(x, y, form % number, ha="center", va="center", color="black")
    panel.grid(False)
    panel.set_xticks(range(len(plan.intervals)), plan.intervals)
    panel.set_yticks(range(len(plan.ks)), plan.ks)
    panel.set(title=title, xlabel="I_ckpt, iterations", ylabel="K_pec")


def _against_plt(panel, samples: list[dict]) -> None:
    free = {s["seed"]: s["loss"] for s in samples if s["kind"] == "fault-free"}
    for selection, marker in (("sequential", "o"), ("load_aware", "x")):
        shown = [s for s in samples if s["kind"] == "grid" and s["selection"] == selection and s["seed"] in free]
        lost, differences = [100 * s["plt"] for s in shown], [s["loss"] - free[s["seed"]] for s in shown]
        panel.scatter(lost, differences, marker=marker, label=selection)
    spread = yardsticks(samples)["spread_over_seeds"]
    if spread is not None:
        panel.axhspan(-spread, spread, color=faint(), zorder=0, label="spread over seeds without a fault")
    panel.axvline(3.75, color=faint(), linestyle=":", label="3.75 %")
    panel.set(title="(c) each run", xlabel="PLT, %", ylabel="validation loss - that without a fault")
    add_legend(panel)


def _curves(panel, samples: list[dict]) -> None:
    """Draws the validation losses, averaged over seeds."""
    for method, runs in _by_method(samples).items():
        points = [dict(map(tuple, run["evaluations"])) for run in runs]
        iterations = sorted(set.intersection(*map(set, points)))
        losses = [statistics.mean(of_run[i] for of_run in points) for i in iterations]
        panel.plot(iterations, losses, color=_COLOURS[method], label=method)
    _mark_faults(panel, samples)
    panel.set(title="(d) two nodes, faults dotted", xlabel="iteration", ylabel="validation loss, nats per token")
    if panel.lines:
        add_legend(panel)


def _differences(panel, samples: list[dict]) -> None:
    """Draws the training loss minus the baseline's of the same seed, averaged over seeds and iterations."""
    methods = _by_method(samples)
    base = {run["seed"]: run["train_losses"] for run in methods.get("baseline", [])}
    for method, runs in methods.items():
        pairs = [(run["train_losses"], base[run["seed"]]) for run in runs if run["seed"] in base]
        if pairs and method != "baseline":
            off = [statistics.mean(a[i] - b[i] for a, b in pairs) for i in range(len(pairs[0][0]))]
            means = [statistics.mean(off[max(0, i - _WINDOW) : i]) for i in range(1, len(off) + 1)]
            panel.plot(range(1, len(off) + 1), means, color=_COLOURS[method], label=method)
    _mark_faults(panel, samples)
    panel.axhline(0, color=ink(), linewidth=0.8)
    panel.set(title=f"(e) training loss - baseline's, mean of {_WINDOW}", xlabel="iteration", ylabel="nats per token")


def _selections(panel, plan: Plan, rows: dict) -> None:
    for offset, selection in ((-0.2, "sequential"), (0.2, "load_aware")):
        found = [rows.get(("grid", f"K={k} I={i} {selection}")) for k, i in plan.by_load]
        heights = [100 * row["plt"] if row else 0.0 for row in found]
        bars = panel.bar([place + offset for place in range(len(found))], heights, width=0.4, label=selection)
        texts = [f"{1000 * row['difference']:+.1f}" if row and row["difference"] is not None else "" for row in found]
        panel.bar_label(bars, texts, fontsize=8)
    panel.set_xticks(range(len(plan.by_load)), [f"K={k} I={i}" for k, i in plan.by_load])
    panel.set(title="(f) by selection: PLT, and above it (b) of that run", ylabel="PLT, %")
    add_legend(panel)


def _by_method(samples: list[dict]) -> dict[str, list[dict]]:
    methods: dict[str, list[dict]] = {}
    for sample in samples:
        if sample["kind"] == "curve":
            methods.setdefault(sample["method"], []).append(sample)
    return methods


def _mark_faults(panel, samples: list[dict]) -> None:
    for fault in next((s["faults"] for s in samples if s["kind"] == "curve"), ()):
        panel.axvline(fault, color=faint(), linestyle=":")
