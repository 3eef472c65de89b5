"""Reports measurements as medians, a table and a plot."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks import common
from benchmarks.save_peers.cases import CASES, OURS
from moc.plots import add_legend, drawings

WIDTH = 120  # columns of a table
TARGETS = {  # ours relative to peers and to the machine
    "stall_ratio": ("async stall / best peer's blocking stall", "<=", 0.05),
    "capture_ratio": ("capture / memcpy", ">=", 0.8),
    "persist_ratio": ("persisting / sequential writing", ">=", 0.8),
    "load_ratio": ("loading / sequential reading", ">=", 0.7),
}


def summary(measured: dict, every: int, plain_s: list[float]) -> dict:
    """Returns the medians of a case.

    Args:
        measured: result of :func:`benchmarks.save_peers.rounds.measure`, with ``copied_bytes``, copied in memory by a
            save, if known.
        every: iterations of a round.
        plain_s: seconds of iterations without saves.

    Returns:
        ``overhead_s``: training time added by a save, a round minus its iterations without a save; ``durable_s``: until
        the bytes are on disk; ``copies``: bytes copied for each byte saved, or None; the others as measured.
    """
    rounds, plain = measured["rounds"], statistics.median(plain_s)
    middle = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    overhead = statistics.median(r["round_s"] for r in rounds) - every * plain
    durable = statistics.median(r["complete_s"] + r["unsynced_s"] for r in rounds)
    return middle | {
        "plain_s": plain,
        "overhead_s": overhead,
        "durable_s": durable,
        "first_stall_s": measured["first"]["stall_s"],
        "copies": measured["copied_bytes"] / middle["bytes"] if "copied_bytes" in measured else None,
    }


def ratios(cases: dict[str, dict], limits: dict | None) -> dict[str, float]:
    """Returns our results relative to the best peer and to the machine (``limits.py``), if both were measured."""
    result, ours = {}, cases.get("ours-disk")
    blocking = [s["stall_s"] for name, s in cases.items() if CASES[name].blocking and CASES[name].program != OURS]
    if ours and blocking:
        result["stall_ratio"] = ours["stall_s"] / min(blocking)
    for name, limit in (("capture", "memcpy"), ("persist", "write"), ("load", "read_cold")):
        if limits:
            result[f"{name}_ratio"] = limits[f"{name}_bytes_per_s"] / limits[f"{limit}_bytes_per_s"]
    return result


def beside(cases: dict[str, dict], peer: str = "deepspeed-blocking") -> dict[str, dict[str, float]]:
    """Returns by case, relative to a peer: stall of a save, bytes, and bytes per second until they are on disk."""
    if peer not in cases:
        return {}

    def figures(name: str) -> dict[str, float]:
        one = cases[name]
        on_disk = {"bytes_per_s": one["bytes"] / one["durable_s"]} if CASES[name].keeps == "disk" else {}
        return {"stall_s": one["stall_s"], "bytes": one["bytes"]} | on_disk

    of_peer = figures(peer)
    return {name: {key: value / of_peer[key] for key, value in figures(name).items()} for name in cases}


def table(layout: str, told: dict):
    """Returns a table of one layout for a console."""
    columns = ["way of saving", "stall, s", "first stall, s", "overhead, s", "iteration, s", "on disk after, s", "MB"]
    rows = []
    for name, s in told["cases"].items():
        after = f"{s['durable_s']:.2f}" if CASES[name].keeps == "disk" else "-"
        seconds = [f"{s[k]:.3f}" for k in ("stall_s", "first_stall_s")]
        seconds += [f"{s[k]:.2f}" for k in ("overhead_s", "plain_s")]
        copies = "-" if s["copies"] is None else f"{s['copies']:.2f}"
        rows.append([CASES[name].label, *seconds, after, f"{s['bytes'] / 1e6:,.0f}", copies])
    return common.table(f"{layout}: medians for each save", [*columns, "copies"], rows)


def lines(told: dict) -> list[str]:
    """Returns the results outside the table: the machine's limits, ours relative to them, and omitted cases."""
    said = []
    if told["limits"]:
        names = ("memcpy", "capture", "write", "persist", "read_cold", "load", "read_warm")
        rates = ", ".join(f"{n} {told['limits'][f'{n}_bytes_per_s'] / 1e9:.2f} GB/s" for n in names)
        said.append(f"the machine, {told['limits']['bytes'] / 1e6:,.0f} MB by all workers together: {rates}")
    for name, value in told["ratios"].items():
        text, sign, target = TARGETS[name]
        said.append(f"{text}: {value:.3f} (target {sign} {target}: {common.met(value, sign, target)})")
    for name, multiples in told["beside"].items():
        each = ", ".join(f"{what} {value:.3f}" for what, value in multiples.items())
        said.append(f"{CASES[name].label}, as multiples of DeepSpeed's blocking save_checkpoint: {each}")
    said += [f"not measured: {CASES[name].label}: {why}" for name, why in told["left_out"].items()]
    return said


def plot(layouts: dict[str, dict], path: Path) -> None:
    """Draws bars of stall and overhead for each save method; one panel per layout."""
    for figure, [panels] in drawings(path, columns=len(layouts), dpi=150, figsize=(7 * len(layouts), 5)):
        for panel, (layout, told) in zip(panels, layouts.items(), strict=True):
            names = list(told["cases"])[::-1]
            places = range(len(names))
            for offset, key, text in ((0.2, "stall_s", "stall"), (-0.2, "overhead_s", "overhead")):
                values = [max(told["cases"][name][key], 0.0) for name in names]
                bars = panel.barh([p + offset for p in places], values, height=0.4, label=text)
                panel.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
            panel.set_yticks(places, [CASES[name].label for name in names])
            panel.margins(x=0.12)
            panel.set(title=layout, xlabel="seconds for each save")
            add_legend(panel)
        figure.suptitle("Time of a save that training waits for")
