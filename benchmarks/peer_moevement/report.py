"""The comparison as tables for people, from what the benchmark writes."""

from __future__ import annotations

from collections.abc import Mapping


def tables(told: Mapping) -> str:
    """Two tables in Markdown: what saving costs, and what follows a kill.

    Args:
        told: the benchmark's JSON.
    """
    lines = ["| | an iteration, ms | more than without | MB of a snapshot | MB of a window |", "|---|---|---|---|---|"]
    for cases in told["iterations"].values():
        lines += [_cost(name, of, told["snapshot_bytes"].get(name)) for name, of in cases.items()]
    lines += ["", "| | first new iteration, s | computed again | parameters identical | largest difference |"]
    lines += ["|---|---|---|---|---|"]
    return "\n".join(lines + [_fault(name, of) for name, of in told["faults"].items()])


def _cost(name: str, of: Mapping, amounts: list[int] | None) -> str:
    cells = [f"{of['iteration_s'] * 1e3:.0f}", "", "", ""]
    if amounts:
        sizes = " / ".join(f"{amount / 1e6:.1f}" for amount in amounts)
        cells[1:] = [f"{of['overhead']:+.0%}", sizes, f"{sum(amounts) / 1e6:.1f}"]
    return f"| {name} | {' | '.join(cells)} |"


def _fault(name: str, of: Mapping) -> str:
    if "failed" in of:
        return f"| {name} | failed | | | |"
    apart = f"{of['largest']:.2g}" if of["largest"] else "0"
    return f"| {name} | {of['first_new_s']:.2f} | {of['again']} | {of['identical']} of {of['parameters']} | {apart} |"
