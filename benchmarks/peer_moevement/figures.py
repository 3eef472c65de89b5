"""Computes the compared figures from the events and final states of jobs, and formats them as tables.

Both systems write the same events: ``iteration`` (number, ``elapsed_s``), and ``resume`` when training continues after
a failure.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy

from benchmarks.live.job import reader_of
from benchmarks.live.recoveries import first_new
from moc.store.storage import LocalStorage
from moc.store.store import Store

State = Mapping[tuple[str, str], numpy.ndarray]
"""Values by parameter, and by optimizer-state key or chunk."""
SLOTS = ("master", "exp_avg", "exp_avg_sq")
_ERROR = re.compile(r"\w+Error: .*")


def iteration_seconds(events: Sequence[dict], warm_up: int) -> list[float]:
    """Returns the seconds of each iteration after the first ones of a job."""
    return [e["elapsed_s"] for e in events if e["type"] == "iteration" and e["iteration"] > warm_up]


def recovery(events: Sequence[dict], killed: float) -> dict[str, float] | None:
    """Returns the steps of a recovery; ``killed`` is the time of the kill in Unix seconds.

    Returns:
        ``first_new_s``: seconds from the kill to the end of the first iteration that had not completed before;
        ``again``: iterations computed again, maximum over workers; and for each step of the recovery the seconds
        until the last worker reported it. None if the job did not reach a new iteration.
    """
    if (found := first_new(events, killed)) is None:
        return None
    resumed, last, new = found
    after = [e for e in events if killed <= e["time"] <= new["time"]]
    again = last["iteration"] - events[resumed]["iteration"] + sum(e["type"] == "replay" for e in after)
    again = max([again, *(e["replayed"] for e in after if "replayed" in e)])
    told = {"first_new_s": new["time"] - killed, "again": again}
    for kind in ("noticed", "built", "rejoined", "pulled", "replay begins", "resume"):
        if moments := [e["time"] for e in after if e["type"] == kind]:
            told[f"{kind}_s"] = max(moments) - killed
    return told


def snapshot_bytes(events: Sequence[dict], window: int, last: bool = False) -> list[int]:
    """Returns the bytes of each of ``window`` consecutive snapshots, over all workers.

    Our events report each snapshot; the public ones report each worker's ``share`` in the snapshots that it still
    holds. A job's first snapshots and our full one at its end are not typical. So the snapshots are taken from the
    middle, or with ``last`` from before that end.
    """
    by_iteration = defaultdict(int)
    for event in events:
        if event["type"] in ("snapshot", "share"):
            by_iteration[event["iteration"]] += event["bytes"]
    amounts = [amount for _, amount in sorted(by_iteration.items())]
    begin = max(0, len(amounts) - 1 - window) if last else (len(amounts) - window) // 2
    return amounts[begin : begin + window]


def differences(ended: State, expected: State) -> dict[str, float]:
    """Returns the difference between the final state of a run and of a run without faults.

    Returns:
        ``parameters``, and the number of these that are ``identical``: masters and moments are bit-identical;
        ``largest``: largest difference of any value; ``largest_master``: largest difference of master weights.

    Raises:
        ValueError: the states have different contents.
    """
    if ended.keys() != expected.keys():
        raise ValueError(f"the ends of two runs do not hold the same: {sorted(ended.keys() ^ expected.keys())[:3]}")
    identical, largest = dict.fromkeys((name for name, _ in expected), True), {True: 0.0, False: 0.0}
    for (name, part), values in expected.items():
        identical[name] &= values.tobytes() == ended[name, part].tobytes()
        if values.size:
            apart = float(numpy.max(numpy.abs(values.astype(numpy.float64) - ended[name, part])))
            is_master = part.startswith("master")
            largest[is_master] = max(largest[is_master], apart)
    told = {"parameters": len(identical), "identical": sum(identical.values())}
    return told | {"largest": max(largest.values()), "largest_master": largest[True]}


def overheads(seconds: Mapping[str, Sequence[Sequence[float]]], base: str) -> dict[str, dict]:
    """Returns by case the median iteration, and its overhead relative to the case ``base``, without snapshots.

    Args:
        seconds: seconds of the iterations by case and round.
        base: case without snapshots.

    Returns:
        ``iteration_s``: median of the rounds' medians; ``overhead``: median over rounds of the ratio to the base's
        median in the same round, minus 1.
    """
    medians = {case: [median(one) for one in rounds] for case, rounds in seconds.items()}
    return {
        case: {
            "iteration_s": median(of),
            "overhead": median(mine / plain - 1 for mine, plain in zip(of, medians[base], strict=True)),
        }
        for case, of in medians.items()
    }


def reason(words: str) -> str:
    """Returns the job's failure, followed by the first error of a worker in its last output."""
    first, *others = words.splitlines()
    found = next((match[0] for line in others if (match := _ERROR.search(line))), None)
    return first if found is None else f"{first.partition('; ')[0]}: {found}"


def our_end(snapshots: Path, iteration: int) -> State:
    """Returns the state in the last snapshot, which is complete; parameters are in the workers' chunks.

    Raises:
        CheckpointError: the snapshot is missing.
    """
    reader = reader_of(Store(LocalStorage(snapshots)), iteration)
    pieces = ((source.box, source.read_tensor()) for source in reader.sources())
    return {(e.name, f"{e.slot} {e.region.offset} {e.region.shape}"): values.numpy().copy() for e, values in pieces}


def public_end(directory: Path) -> State:
    """Returns the state written by the workers (``worker.py``): joins their flat parts and splits them by parameter."""
    workers = []
    for path in directory.glob("rank_*.npz"):
        with numpy.load(path) as file:
            workers.append(dict(file))
    told = {}
    for stage in sorted({int(worker["stage"]) for worker in workers}):
        mine = [worker for worker in workers if worker["stage"] == stage]
        mine.sort(key=lambda worker: int(worker["data_rank"]))
        for group in sorted({key.partition("/")[0] for key in mine[0] if "/" in key}):
            names, ends = mine[0][f"{group}/names"], numpy.cumsum(mine[0][f"{group}/sizes"])
            for slot in SLOTS:
                whole = numpy.concatenate([worker[f"{group}/{slot}"] for worker in mine])
                pieces = numpy.split(whole, ends)  # the last one is padding
                told |= {(str(name), slot): piece for name, piece in zip(names, pieces, strict=False)}
    return told


def tables(told: Mapping) -> str:
    """Formats the benchmark's JSON as two Markdown tables: cost of saving, and recovery after a kill."""
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
