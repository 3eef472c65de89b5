"""Ours, through the program that users run: its flags, and what its events say."""

from __future__ import annotations

from pathlib import Path

from benchmarks.save_peers.rounds import WARM_UP, Plan


def saving_flags(mode: str, plan: Plan, log: Path, memory: str) -> list[str]:
    """Flags of a run with a first save, ``plan.saves`` more, and the iterations that follow the last one."""
    return _flags(mode, plan, log, memory, _iterations(plan))


def loading_flags(mode: str, plan: Plan, log: Path, memory: str) -> list[str]:
    """Flags of a run that goes on from the last save of such a run, and trains one more iteration."""
    # the learning rate's schedule follows from the number of iterations
    return [*_flags(mode, plan, log, memory, _iterations(plan) + 1), "--use-checkpoint-opt-param-scheduler"]


def _flags(mode: str, plan: Plan, log: Path, memory: str, iterations: int) -> list[str]:
    return [
        *("--ckpt-dir", str(plan.directory), "--snapshot-interval", str(plan.every)),
        *mode.split(),
        *("--ckpt-memory-dir", memory, "--train-iters", str(iterations), "--log-dir", str(log)),
    ]


def plain_flags(plan: Plan, log: Path) -> list[str]:
    """Flags of a run that saves nothing."""
    return ["--train-iters", str(WARM_UP + plan.plain), "--log-dir", str(log)]


def _iterations(plan: Plan) -> int:
    return plan.every * (plan.saves + 2) - 1


def plain_seconds(events: list[dict]) -> list[float]:
    """Seconds of each iteration but the first ones."""
    return [e["elapsed_s"] for e in events if e["type"] == "iteration" and e["iteration"] > WARM_UP]


def rounds(events: list[dict], plan: Plan) -> dict:
    """What a peer's program tells, and ``capture_s`` and ``persist_s``.

    A save begins within the iteration that it is named after, when the update is done; a round is that iteration and
    those up to the next save.
    """
    ends = {e["iteration"]: e["time"] for e in events if e["type"] == "iteration"}
    saved = [number * plan.every for number in range(1, plan.saves + 2)]
    told = [
        _save(events, iteration) | {"round_s": ends[iteration + plan.every - 1] - ends[iteration - 1]}
        for iteration in saved
    ]
    # a snapshot is copied once, into the buffer that is hashed and written
    return {"first": told[0], "rounds": told[1:], "copied_bytes": told[-1]["bytes"]}


def _save(events: list[dict], iteration: int) -> dict:
    """A snapshot's events in the peers' words; seconds of copying, writing and standing still are means of workers."""
    kinds = ("iteration", "snapshot", "stall", "persist")
    of_it = {kind: [e for e in events if e["type"] == kind and e.get("iteration") == iteration] for kind in kinds}
    if not of_it["snapshot"]:
        raise ValueError(f"events.jsonl tells of no snapshot of iteration {iteration}: look at the run's output")
    taken, written = of_it["snapshot"][0], next(iter(of_it["persist"]), None)
    stall = sum(e["seconds"] for e in of_it["stall"])
    done = (written or taken)["time"] - of_it["iteration"][0]["time"]
    return {
        "stall_s": stall,
        "complete_s": max(stall, done),
        "unsynced_s": 0.0,
        "bytes": taken["bytes"],
        "capture_s": taken["copy_s"],
        "persist_s": written["write_s"] if written else 0.0,
    }


def load_seconds(events: list[dict]) -> float:
    """Seconds in which a run loaded, from the manifest to the state that is whole on all workers."""
    resumed = [e["seconds"] for e in events if e["type"] == "resume"]
    if not resumed:
        raise ValueError("events.jsonl tells of no resume: look at the run's output")
    return resumed[0]
