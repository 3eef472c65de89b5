"""Prints, writes and draws the results of simulations."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from moc.cli_output import print_json, print_lines, replacing
from moc.plots import add_legend, drawings
from moc.simulate.engine import Result, SimulatedJob
from moc.simulate.failures import Faults
from moc.simulate.planner import PolicyChoice
from moc.simulate.policies import Setup

_COLUMNS = (
    "ettr overhead recovery_each_s longest_s failures replayed useful_s saving_s slower_s recovery_s idle_s wall_s "
    "fell_back iterations samples k plt host_bytes"
).split()

_SHARES = 6  # most frequent numbers of nodes that are named


def print_run(
    setup: Setup,
    faults: Faults,
    job: SimulatedJob,
    means: Mapping[str, Result],
    chosen: PolicyChoice | None,
    as_json: bool,
) -> None:
    """Prints mean results by title, as a table or JSON, and the planner's choice, if any."""
    if as_json:
        fields = {
            "setup": _facts(setup, faults),
            "policies": {title: result.to_dict() for title, result in means.items()},
        }
        fields |= {"choice": {"best": chosen.best.name, "reason": chosen.reason}} if chosen else {}
        print_json(fields)
        return
    print_lines(*_title(setup, faults, job), "")
    header = "policy,ETTR,overhead,a failure,longest,failures,samples/s,PLT,host,net,disk".split(",")
    print_lines(*aligned([header, *(_row(title, result) for title, result in means.items())]))
    if changing := [line for title, result in means.items() for line in _on_nodes(title, result)]:
        print_lines("", *changing)
    if chosen:
        print_lines("", *sentences(chosen.reason))


def sentences(text: str) -> list[str]:
    """Returns a text as lines, one for each sentence."""
    return text.replace(". ", ".\n").split("\n")


def _title(setup: Setup, faults: Faults, job: SimulatedJob) -> list[str]:
    cluster, layout, timing = setup.cluster, setup.layout, setup.timing
    parameters = sum(o.parameters for o in setup.operators)
    failure_text = f"{sum(bool(e.lost) for e in faults.trace)} losses in the trace" if faults.trace else _mtbf(faults)
    rates = (cluster.host_bandwidth, cluster.inter_bandwidth, cluster.storage_bandwidth)
    host, network, storage = (f"{rate / 1e9:.3g}" for rate in rates)
    rollback = "" if setup.program else f"; all workers replay after {cluster.detect_s + cluster.restart_s:.4g} s"
    return [
        f"{parameters / 1e9:.1f} B parameters on {cluster.gpus:,} GPUs ({cluster.name}): "
        f"TP {layout.tp}, PP {layout.pp}, EP {layout.ep}, DP {layout.dp}",
        f"{timing.iteration_s:.3g} s an iteration; {job.wall_s / 3600:g} hours; {failure_text}",
        f"GB/s: {host} from a GPU to host memory, {network} between nodes, {storage} to storage",
        f"a snapshot costs its iteration {100 * setup.overhead:.3g} % at least{rollback}",
    ]


def _mtbf(faults: Faults) -> str:
    if faults.mtbf_s is None or math.isinf(faults.mtbf_s):
        return "no failures"
    return f"a failure every {faults.mtbf_s:,.0f} s{' evenly' if faults.evenly else ', at random'}"


def _facts(setup: Setup, faults: Faults) -> dict:
    return {
        "cluster": dataclasses.asdict(setup.cluster),
        "layout": dataclasses.asdict(setup.layout),
        "timing": dataclasses.asdict(setup.timing),
        "snapshot_bytes": setup.full.total,
        "snapshot_overhead": setup.overhead,
        "mtbf_s": faults.mtbf_s,
    }


def _row(title: str, result: Result) -> list[str]:
    return [
        title,
        f"{result.ettr:.3f}",
        f"{100 * result.overhead:.1f} %",
        f"{result.recovery_each_s:.1f} s",
        f"{result.longest_s:.0f} s",
        f"{result.failures}",
        f"{result.samples / result.wall_s:.1f}",
        f"{100 * result.plt:.2g} %" if result.plt else "",
        *(f"{nbytes / 1e12:,.2f} TB" for nbytes in dataclasses.astuple(result.written)),
    ]


def _on_nodes(title: str, result: Result) -> Iterator[str]:
    """Yields lines on shares of time by number of nodes, if it changes, and on unusual recoveries."""
    if len(result.nodes_s) > 1:
        shares = sorted(((seconds / result.wall_s, nodes) for nodes, seconds in result.nodes_s.items()), reverse=True)
        shares_text = [
            f"{100 * share:.1f} % {f'on {nodes}' if nodes else 'waiting'}" for share, nodes in shares[:_SHARES]
        ]
        remaining_share = sum(share for share, _ in shares[_SHARES:])
        shares_text += [f"{100 * remaining_share:.1f} % on others"] if remaining_share else []
        yield f"{title}, nodes: {', '.join(shares_text)}"
    reasons = {key.partition(": ")[0] for key in result.fallbacks}
    for reason in sorted(reasons):
        fallbacks = sorted(
            ((n, key) for key, n in result.fallbacks.items() if key.startswith(f"{reason}: ")), reverse=True
        )
        losses = ", ".join(key.partition(": ")[2] for _, key in fallbacks[:_SHARES])
        yield f"{title}, from storage {sum(n for n, _ in fallbacks):.3g} times: {reason} ({losses})"


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Returns lines of aligned columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]).rstrip()
        for line in lines
    ]


def write_csv(path: str, means: Mapping[str, Result]) -> None:
    """Writes one line per policy, with mean results by title; replaces the file atomically."""
    with replacing(path) as name, open(name, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        written = [f"{where}_bytes_written" for where in ("host", "network", "storage")]
        writer.writerow(["policy", *_COLUMNS, *written])
        for title, result in means.items():
            values = result.to_dict()
            writer.writerow([title, *(values[name] for name in _COLUMNS), *dataclasses.astuple(result.written)])


def plot(path: str, results: Mapping[str, Result]) -> None:
    """Draws goodput over time of results by title, as a PNG and its dark twin."""
    for _, [[panel]] in drawings(path, figsize=(9, 5)):
        for number, (title, result) in enumerate(results.items()):
            hours = [(part + 0.5) * result.wall_s / len(result.goodput) / 3600 for part in range(len(result.goodput))]
            panel.plot(hours, result.goodput, color=f"C{number}", label=f"{title} ({result.ettr:.3f})")
            panel.axhline(result.samples / result.wall_s, color=f"C{number}", linestyle="--", linewidth=0.8)
        panel.set_title("Simulated goodput; dashed: mean over the run")
        panel.set(xlabel="hours since the begin", ylabel="goodput, samples per second", ylim=(0, None))
        add_legend(panel, title="policy (ETTR)")
