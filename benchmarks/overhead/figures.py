"""Computes the figures of MoC-System's sections 6.2.1 to 6.2.3 from events; pure functions.

A snapshot begins at the end of iteration N, after the update. With ``--ckpt-blocking`` training waits there. Otherwise
the copies overlap with forward and backward of N + 1, whose update waits for the remaining copies. The writes overlap
with later iterations.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.save_peers import ours
from benchmarks.save_peers.cases import WORKERS
from benchmarks.save_peers.rounds import WARM_UP, Plan

LEVELS = ("memory", "storage")
TARGETS = {
    "o_save_reduction": (">=", 0.98, "O_save below the baseline's"),
    "interval_ratio": ("<=", 0.5, "I_ckpt of Base-Async's"),
}


def measured(events: list[dict], sizes: Mapping[str, Mapping[int, list[int]]], plan: Plan) -> dict:
    """Returns the measurements of one run of one method.

    Args:
        events: events of the run.
        sizes: bytes of each rank's file, by level and iteration.
        plan: size of the measurement.

    Returns:
        ``plain_s``: seconds of each iteration before the first snapshot; ``first`` and ``rounds``, for each snapshot:
        the result of :func:`benchmarks.save_peers.ours.rounds`, ``hash_s``, ``publish_s``, ``extra_s`` (additional time
        of the iteration at whose end it begins and of the next one), ``overhead_s`` (additional time of all iterations
        up to the next snapshot), ``iterations`` (number that ended before it was in storage) and ``ranks``, bytes of
        each rank by level.

    Raises:
        ValueError: a snapshot is missing, or was not in storage before the next one began.
    """
    told = ours.rounds(events, plan)
    elapsed = {e["iteration"]: e["elapsed_s"] for e in events if e["type"] == "iteration"}
    plain = [seconds for iteration, seconds in elapsed.items() if WARM_UP < iteration < plan.every]
    normal = statistics.median(plain)
    rounds = []
    for number, base in enumerate([told["first"], *told["rounds"]], start=1):
        iteration = number * plan.every
        snapshot, persist = (_event(events, kind, iteration) for kind in ("snapshot", "persist"))
        later = {e["iteration"]: e["time"] for e in events if e["type"] == "iteration" and e["iteration"] > iteration}
        _refuse_late(persist, iteration + plan.every, later)
        more = {
            "hash_s": snapshot["hash_s"],
            "publish_s": persist["publish_s"],
            "extra_s": elapsed[iteration] + elapsed[iteration + 1] - 2 * normal,
            "overhead_s": base["round_s"] - plan.every * normal,
            "iterations": sum(end <= persist["time"] for end in later.values()),
            "ranks": _ranks(sizes, iteration),
        }
        rounds.append(base | more)
    return {"plain_s": plain, "first": rounds[0], "rounds": rounds[1:]}


def _event(events: list[dict], kind: str, iteration: int) -> dict:
    found = [e for e in events if e["type"] == kind and e["iteration"] == iteration]
    if not found:
        why = "storage was still busy with an earlier snapshot, so give it more iterations with --every"
        raise ValueError(f"events.jsonl has no {kind} of iteration {iteration}: {why}")
    return found[0]


def _refuse_late(persist: dict, next_snapshot: int, ends: Mapping[int, float]) -> None:
    if persist["time"] > ends.get(next_snapshot, math.inf):
        why = f"the snapshot of iteration {persist['iteration']} reached storage after snapshot {next_snapshot} began"
        raise ValueError(f"{why}, so the measurements of two snapshots overlap: give it more iterations with --every")


def _ranks(sizes: Mapping[str, Mapping[int, list[int]]], iteration: int) -> dict[str, list[int]]:
    """Returns the bytes of each rank by level; without a memory tier, the copy buffer is as large as the file."""
    found = {level: sizes.get(level, {}).get(iteration) for level in LEVELS}
    if found["storage"] is None:
        raise ValueError(f"the manifest of iteration {iteration} was removed before the benchmark read it")
    return {level: found[level] or found["storage"] for level in LEVELS}


def pooled_iteration_s(samples: Mapping[str, Sequence[dict]]) -> float:
    """Returns the median of all iterations without a snapshot, over all methods, which train identically."""
    return statistics.median(s for runs in samples.values() for run in runs for s in run["plain_s"])


def summary(runs: Sequence[dict], iteration_s: float, blocking: bool) -> dict:
    """Returns medians over all snapshots of a method except the first of each run.

    Args:
        runs: results of :func:`measured`.
        iteration_s: seconds of an iteration without a snapshot.
        blocking: training waits until a checkpoint is in storage.

    Returns:
        ``o_save_s``: seconds that training waits, mean over workers; ``o_save_most_s``: the same if the workers waited
        one after the other and each for all others; ``extra_s`` and ``overhead_s`` of :func:`measured`; ``copy_s``,
        ``hash_s`` and their sum ``t_snapshot_s``; ``write_s``, ``publish_s`` and their sum ``t_persist_s``;
        ``stored_s``: from the beginning of a snapshot until its commit in storage; ``interval_exact``: the same in
        iterations; ``interval``: I_ckpt, ``interval_exact`` rounded up, or 1 if training waits; ``work``: T_snapshot +
        T_persist in iterations, without the wait for commit all-reduces; ``bytes`` of all ranks and ``bottleneck``, of
        the busiest rank, by level.
    """
    saves = [save for run in runs for save in run["rounds"]]
    middle = {name: statistics.median(s[name] for s in saves) for name in saves[0] if name != "ranks"}
    exact = middle["complete_s"] / iteration_s
    snapshot_s, persist_s = middle["capture_s"] + middle["hash_s"], middle["persist_s"] + middle["publish_s"]
    return {
        "plain_s": statistics.median(s for run in runs for s in run["plain_s"]),
        "o_save_s": middle["stall_s"],
        "o_save_most_s": middle["stall_s"] * (1 if blocking else WORKERS),
        "extra_s": middle["extra_s"],
        "overhead_s": middle["overhead_s"],
        "copy_s": middle["capture_s"],
        "hash_s": middle["hash_s"],
        "t_snapshot_s": snapshot_s,
        "write_s": middle["persist_s"],
        "publish_s": middle["publish_s"],
        "t_persist_s": persist_s,
        "stored_s": middle["complete_s"],
        "interval_exact": exact,
        "interval": 1 if blocking else max(1, math.ceil(exact)),
        "work": (snapshot_s + persist_s) / iteration_s,
        "iterations_until_stored": middle["iterations"],
        "bytes": {level: statistics.median(sum(s["ranks"][level]) for s in saves) for level in LEVELS},
        "bottleneck": {level: statistics.median(max(s["ranks"][level]) for s in saves) for level in LEVELS},
    }


def against(moc: dict, baseline: dict | None, base_async: dict | None) -> dict[str, float]:
    """Returns the comparison of a MoC-Async with the baseline and Base-Async, if they were measured.

    Returns:
        ``o_save_reduction``: reduction of O_save against the baseline, 1 if no O_save remains;
        ``o_save_most_reduction``: the same if workers waited one after the other; ``interval_ratio``: I_ckpt relative
        to Base-Async; ``interval_exact_ratio``: the same before rounding up; ``work_ratio``: ratio of T_snapshot +
        T_persist.
    """
    told = {}
    if baseline is not None:
        for name in ("o_save", "o_save_most"):
            told[f"{name}_reduction"] = 1 - moc[f"{name}_s"] / baseline[f"{name}_s"]
    if base_async is not None:
        for name in ("interval", "interval_exact", "work"):
            told[f"{name}_ratio"] = moc[name] / base_async[name]
    return told


def of_baseline(summary: dict, baseline: dict) -> dict[str, float]:
    """Returns the costs of a method relative to the baseline, which saves everything (MoC-System, Figures 10, 11).

    Returns:
        Ratios of ``t_snapshot`` and ``t_persist``, which are means over workers and do not describe the busiest one;
        and by level the ratios of ``bytes`` of all ranks and of the busiest rank (``bottleneck``).
    """
    told = {name: summary[f"{name}_s"] / baseline[f"{name}_s"] for name in ("t_snapshot", "t_persist")}
    for name in ("bytes", "bottleneck"):
        told |= {f"{name}_{level}": summary[name][level] / baseline[name][level] for level in LEVELS}
    return told


def followed(events: list[dict], every: int, snapshots: int) -> dict:
    """Returns the results of a run with a snapshot every ``every`` iterations, without the first snapshot.

    Returns:
        ``due`` snapshots; how many of these were ``stored``; ``stall_s`` for each; median ``iteration_s`` meanwhile.
    """
    due = [number * every for number in range(2, snapshots + 2)]
    stored = {e["iteration"] for e in events if e["type"] == "persist"}
    stalls = (e["seconds"] for e in events if e["type"] == "stall" and e["iteration"] in due)
    between = (e for e in events if e["type"] == "iteration" and due[0] < e["iteration"] <= due[-1] + every)
    return {
        "every": every,
        "due": len(due),
        "stored": len(stored.intersection(due)),
        "stall_s": sum(stalls) / len(due),
        "iteration_s": statistics.median(e["elapsed_s"] for e in between),
    }


_TIMER = r"^\s*{name} \.*: \([\d.]+, ([\d.]+)\)"
_FORWARD_BACKWARD = ("forward-backward", "all-grads-sync")


def forward_backward_share(output: str, elapsed_s: Iterable[float]) -> float:
    """Returns the share of an iteration that can hide a snapshot: forward, backward and gradient reduction.

    Args:
        output: output of a run with ``--timing-log-level 1``; for each timer, the slowest rank counts.
        elapsed_s: seconds of all its iterations.

    Raises:
        ValueError: the output lacks an iteration.
    """
    elapsed_s = list(elapsed_s)
    seconds = [[float(ms) / 1000 for ms in re.findall(_TIMER.format(name=n), output, re.M)] for n in _FORWARD_BACKWARD]
    if any(len(timed) != len(elapsed_s) for timed in seconds):
        raise ValueError(
            f"the output times {' and '.join(_FORWARD_BACKWARD)} of {[len(timed) for timed in seconds]} iterations of "
            f"{len(elapsed_s)}: run with --timing-log-level 1 and --log-interval 1"
        )
    shares = [sum(parts) / whole for *parts, whole in zip(*seconds, elapsed_s, strict=True)]
    return statistics.median(shares[WARM_UP:])
