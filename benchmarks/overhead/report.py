"""Reports the figures as a table, as sentences, and as bars similar to MoC-System's Figures 11 and 12."""

from __future__ import annotations

from pathlib import Path

from benchmarks import common
from benchmarks.overhead.figures import LEVELS, TARGETS
from benchmarks.overhead.methods import METHODS
from moc.plots import drawings

WIDTH = 150  # columns of a table
_SECONDS = {  # columns: key of a summary, and digits
    "O_save": ("o_save_s", 4),
    "1st + 2nd iteration": ("extra_s", 2),
    "all iterations": ("overhead_s", 2),
    "T_snapshot": ("t_snapshot_s", 2),
    "T_persist": ("t_persist_s", 2),
    "in storage": ("stored_s", 2),
    "work / iteration": ("work", 2),
}


def table(layout: str, told: dict):
    """Returns a table of one layout for a console: seconds and MB."""
    title = f"{layout}: medians for each snapshot, in seconds and MB; an iteration takes {told['iteration_s']:.2f} s"
    columns = ["method", *_SECONDS, "I_ckpt", *(f"MB in {level}: all / busiest rank" for level in LEVELS)]
    rows = []
    for name, s in told["methods"].items():
        seconds = [f"{s[key]:.{digits}f}" for key, digits in _SECONDS.values()]
        sizes = [f"{s['bytes'][level] / 1e6:,.1f} / {s['bottleneck'][level] / 1e6:,.1f}" for level in LEVELS]
        rows.append([METHODS[name].label, *seconds, f"{s['interval']} ({s['interval_exact']:.2f})", *sizes])
    return common.table(title, columns, rows)


def lines(told: dict) -> list[str]:
    """Returns the results outside the table: targets, alternative measures, and failures."""
    forward_backward = told["forward_backward_s"]
    said = [f"forward and backward {forward_backward:.2f} s, update {told['iteration_s'] - forward_backward:.2f} s"]
    for name, ratios in told["ratios"].items():
        said += _sentences(METHODS[name].label, ratios)
    said += [_of_baseline(METHODS[name].label, ratios) for name, ratios in told["of_baseline"].items()]
    said += [_followed(METHODS[name].label, check) for name, checks in told["followed"].items() for check in checks]
    for name, size in told["sizes"].items():
        shares = ", ".join(f"{level} {size['measured'][level] / size['equation'][level]:.4f}" for level in LEVELS)
        said.append(f"{METHODS[name].label}, bytes in files relative to eq. 6: {shares}")
    return said + [f"not measured: {METHODS[name].label}: {why}" for name, why in told["failed"].items()]


def _of_baseline(label: str, ratios: dict[str, float]) -> str:
    said = [f"{ratios['t_snapshot']:.1%} of its T_snapshot and {ratios['t_persist']:.1%} of its T_persist, in the mean"]
    for level in LEVELS:
        most = f"{ratios[f'bottleneck_{level}']:.1%} on the busiest rank"
        said.append(f"{ratios[f'bytes_{level}']:.1%} of its bytes in {level} ({most})")
    return f"{label} relative to the baseline: {', '.join(said)}"


def _followed(label: str, check: dict) -> str:
    return (
        f"{label}, a snapshot every {check['every']} iterations: {check['stored']} of {check['due']} in storage, "
        f"training waited {check['stall_s']:.4f} s for each, an iteration took {check['iteration_s']:.2f} s"
    )


def _sentences(label: str, ratios: dict[str, float]) -> list[str]:
    said = []
    for name, (sign, target, text) in TARGETS.items():
        if name in ratios:
            verdict = common.met(ratios[name], sign, target)
            said.append(f"{label}: {ratios[name]:.2%} {text} (target {sign} {target:.0%}: {verdict})")
    if "o_save_reduction" in ratios:
        said.append(f"{label}: {ratios['o_save_most_reduction']:.2%} if workers waited one after the other")
    if "interval_ratio" in ratios:
        said.append(
            f"{label}: {ratios['interval_exact_ratio']:.1%} of Base-Async's interval before rounding up, and "
            f"{ratios['work_ratio']:.1%} of its T_snapshot + T_persist, without waiting for commits"
        )
    return said


def plot(layouts: dict[str, dict], path: Path) -> None:
    """Draws an iteration with a snapshot for each method, one panel per layout."""
    for figure, [panels] in drawings(path, columns=len(layouts), dpi=150, figsize=(8 * len(layouts), 4.5)):
        for panel, (layout, told) in zip(panels, layouts.items(), strict=True):
            _bars(panel, told)
            panel.set(title=layout, xlabel="seconds of an iteration with a snapshot")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        figure.suptitle("Iterations with a snapshot")


def plot_durations(layouts: dict[str, dict], path: Path) -> None:
    """Draws T_snapshot and T_persist of each method, and forward and backward, which can hide the first (Figure 11)."""
    for figure, [panels] in drawings(path, columns=len(layouts), dpi=150, figsize=(8 * len(layouts), 4.5)):
        for panel, (layout, told) in zip(panels, layouts.items(), strict=True):
            count, labels = len(told["methods"]), [METHODS[name].label for name in told["methods"]]
            for shift, (part, color) in enumerate((("t_snapshot", "#dd8452"), ("t_persist", "#3b6ea5"))):
                places = [count - 1 - place - 0.38 * shift for place in range(count)]
                values = [s[f"{part}_s"] for s in told["methods"].values()]
                bars = panel.barh(places, values, height=0.36, color=color, label=part.replace("t_", "T_"))
                panel.bar_label(bars, fmt=" %.2f", fontsize=7)
            panel.axvline(told["forward_backward_s"], color="#4c9f70", linestyle="--", label="F&B")
            panel.set_yticks([count - 1.19 - place for place in range(count)], labels)
            panel.set(title=layout, xlabel="seconds")
            panel.margins(x=0.12)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        figure.suptitle("Duration of snapshots, and of forward and backward (F&B)")


def segments(told: dict) -> dict[str, list[float]]:
    """Returns the seconds of the parts of an iteration with a snapshot, by part, in the order of methods.

    ``beside`` is the part of forward and backward that overlaps with the snapshot. ``slower`` is the additional time of
    the two iterations around the snapshot, without waiting: other threads of the workers compete for the cores.
    """
    forward_backward, methods = told["forward_backward_s"], told["methods"]
    hidden = {name: min(s["t_snapshot_s"], forward_backward) for name, s in methods.items()}
    beside = [0.0 if METHODS[name].blocking else seconds for name, seconds in hidden.items()]
    update = told["iteration_s"] - forward_backward
    return {
        "beside": beside,
        "forward_backward": [forward_backward - overlap for overlap in beside],
        "update": [update] * len(methods),
        "o_save": [s["o_save_s"] for s in methods.values()],
        "slower": [max(0.0, s["extra_s"] - s["o_save_s"]) for s in methods.values()],
    }


_STYLES = {
    "beside": dict(color="#4c9f70", hatch="//", edgecolor="white", label="F&B and snapshot, overlapping"),
    "forward_backward": dict(color="#4c9f70", label="F&B"),
    "update": dict(color="#3b6ea5", label="update"),
    "o_save": dict(color="#c44e52", label="O_save: training waits"),
    "slower": dict(color="white", edgecolor="grey", linestyle=":", label="slower: cores are shared"),
}


def _bars(panel, told: dict) -> None:
    names, left = list(told["methods"]), [0.0] * len(told["methods"])
    places = range(len(names) - 1, -1, -1)
    for part, values in segments(told).items():
        panel.barh(places, values, left=left, height=0.6, **_STYLES[part])
        left = [start + value for start, value in zip(left, values, strict=True)]
    panel.axvline(told["iteration_s"], color="red", linestyle="--", linewidth=1, label="without a snapshot")
    for place, end, s in zip(places, left, told["methods"].values(), strict=True):
        panel.annotate(f" O_save {s['o_save_s']:.3f}, I_ckpt {s['interval']}", (end, place), va="center", fontsize=8)
    panel.set_yticks(places, [METHODS[name].label for name in names])
    panel.set_xlim(0, 1.3 * max(left))  # room for the labels after the bars
