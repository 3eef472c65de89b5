"""From what jobs tell to the figures that are compared; pure functions.

Both sides write the same events: ``iteration`` (number, ``elapsed_s``), ``resume`` when training goes on after a loss.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

import numpy

State = Mapping[tuple[str, str], numpy.ndarray]
"""By parameter, and by what of it (a slot, or a piece of one): the values."""


_ERROR = re.compile(r"\w+Error: .*")


def iteration_seconds(events: Sequence[dict], warm_up: int) -> list[float]:
    """Seconds of each iteration after the first ones of a job."""
    return [e["elapsed_s"] for e in events if e["type"] == "iteration" and e["iteration"] > warm_up]


def recovery(events: Sequence[dict], killed: float) -> dict[str, float] | None:
    """What followed a kill.

    Args:
        events: of the job, in order.
        killed: its moment, in Unix seconds.

    Returns:
        ``first_new_s``, seconds from the kill to the end of the first iteration that had not been complete before;
        ``again``, iterations that were computed again, by whom most of it fell to; and after how many seconds the
        last worker told of each step on the way.  None if the job has not come so far.
    """
    resumed = next((i for i, e in enumerate(events) if e["type"] == "resume" and e["time"] >= killed), None)
    if resumed is None:
        return None
    last = max(e["iteration"] for e in events[:resumed] if e["type"] == "iteration")
    new = next((e for e in events[resumed:] if e["type"] == "iteration" and e["iteration"] > last), None)
    if new is None:
        return None
    after = [e for e in events if killed <= e["time"] <= new["time"]]
    again = last - events[resumed]["iteration"] + sum(e["type"] == "replay" for e in after)
    again = max([again, *(e["replayed"] for e in after if "replayed" in e)])
    told = {"first_new_s": new["time"] - killed, "again": again}
    for kind in ("noticed", "built", "rejoined", "pulled", "replay begins", "resume"):
        if moments := [e["time"] for e in after if e["type"] == kind]:
            told[f"{kind}_s"] = max(moments) - killed
    return told


def snapshot_bytes(events: Sequence[dict], window: int, last: bool = False) -> list[int]:
    """Bytes of each of ``window`` snapshots in a row, over all workers.

    Ours tell of each snapshot, the public ones of each worker's ``share`` in those that they still hold.  The first
    snapshots of a job and ours of everything at its end are not typical, so as many in a row are taken from the
    middle, or the last ones before that end.
    """
    by_iteration = defaultdict(int)
    for event in events:
        if event["type"] in ("snapshot", "share"):
            by_iteration[event["iteration"]] += event["bytes"]
    amounts = [amount for _, amount in sorted(by_iteration.items())]
    begin = max(0, len(amounts) - 1 - window) if last else (len(amounts) - window) // 2
    return amounts[begin : begin + window]


def differences(ended: State, expected: State) -> dict[str, float]:
    """How far a run's end is from that of one without a fault.

    Returns:
        ``parameters`` and how many of them are ``identical``, masters and moments to the last bit; ``largest``, the
        largest difference of any value; ``largest_master`` that of the master weights alone.

    Raises:
        ValueError: they do not hold the same.
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
    """By case, the median iteration, and how much longer it is than without snapshots.

    Args:
        seconds: by case, for each round the seconds of its iterations.
        base: the case without snapshots.

    Returns:
        ``iteration_s`` is the median of the rounds' medians, ``overhead`` the median over rounds of the ratio to the
        base's median in the same round, less 1.
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
    """The first error of a worker among a job's last words, after what the job did not do."""
    first, *others = words.splitlines()
    found = next((match[0] for line in others if (match := _ERROR.search(line))), None)
    return first if found is None else f"{first.partition('; ')[0]}: {found}"
