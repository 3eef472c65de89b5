"""Measures our saving through the users' program: its flags and its events."""

from __future__ import annotations

from pathlib import Path

from benchmarks.save_peers.rounds import WARM_UP, Plan


def saving_flags(mode: str, plan: Plan, log: Path, memory: str) -> list[str]:
    """Returns flags of a run with a first save, ``plan.saves`` more, and the iterations after the last one."""
    return _flags(mode, plan, log, memory, _iterations(plan))


def loading_flags(mode: str, plan: Plan, log: Path, memory: str) -> list[str]:
    """Returns flags of a run that resumes from the last save of such a run and trains one more iteration."""
    # The learning-rate schedule depends on the number of iterations, which differs from the first run.
    return [*_flags(mode, plan, log, memory, _iterations(plan) + 1), "--use-checkpoint-opt-param-scheduler"]


def _flags(mode: str, plan: Plan, log: Path, memory: str, iterations: int) -> list[str]:
    return [
        *("--ckpt-dir", str(plan.directory), "--snapshot-interval", str(plan.every)),
        *mode.split(),
        *("--ckpt-memory-dir", memory, "--train-iters", str(iterations), "--log-dir", str(log)),
    ]


def plain_flags(plan: Plan, log: Path) -> list[str]:
    """Returns flags of a run without saves."""
    return ["--train-iters", str(WARM_UP + plan.plain), "--log-dir", str(log)]


def _iterations(plan: Plan) -> int:
    return plan.every * (plan.saves + 2) - 1


def plain_seconds(events: list[dict]) -> list[float]:
    """Returns the seconds of each iteration after the first ones."""
    return [e["elapsed_s"] for e in events if e["type"] == "iteration" and e["iteration"] > WARM_UP]


def rounds(events: list[dict], plan: Plan) -> dict:
    """Returns the same figures as a peer's program, and ``capture_s`` and ``persist_s``.

    A save begins within the iteration of its name, after the update. A round is that iteration and the following ones
    up to the next save.
    """
    ends = {e["iteration"]: e["time"] for e in events if e["type"] == "iteration"}
    saved = [number * plan.every for number in range(1, plan.saves + 2)]
    told = [
        _save(events, iteration) | {"round_s": ends[iteration + plan.every - 1] - ends[iteration - 1]}
        for iteration in saved
    ]
    # A snapshot is copied once, into the buffer that is hashed and written.
    return {"first": told[0], "rounds": told[1:], "copied_bytes": told[-1]["bytes"]}


def _save(events: list[dict], iteration: int) -> dict:
    """Returns a snapshot's figures under the peers' names; seconds of copies, writes and stalls are worker means."""
    kinds = ("iteration", "snapshot", "stall", "persist")
    of_it = {kind: [e for e in events if e["type"] == kind and e.get("iteration") == iteration] for kind in kinds}
    if not of_it["snapshot"]:
        raise ValueError(f"events.jsonl has no snapshot of iteration {iteration}: look at the run's output")
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
    """Returns the seconds of a load, from the manifest to the complete state on all workers."""
    resumed = [e["seconds"] for e in events if e["type"] == "resume"]
    if not resumed:
        raise ValueError("events.jsonl has no resume: look at the run's output")
    return resumed[0]
