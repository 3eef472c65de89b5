"""An elastic job on a cluster: its flags, and what it should come to when hosts fail and nobody replaces them."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.faults.run import End, missing

HOSTS, LEAST = 5, 3
CLOSE = 1e-5
FLAGS = """--calculate-per-token-loss --elastic --elastic-slots 6 --elastic-min-replicas 3
    --elastic-rebalance-interval 10 --use-distributed-optimizer --lr 1e-4"""
"""Any two of five hosts can be lost at once: each expert, and each block of the optimizer's state, is on three.

Faster, the model learns its samples by heart, and after 80 iterations differences of rounding grow tenfold in each ten.
"""


def as_of_fixed_members(ended: End, expected: End, events: Sequence[dict]) -> list[str]:
    """In what a job whose members change has come to something else than one whose members stay; a sentence each.

    Args:
        ended: of the job.
        expected: of one whose members stay.
        events: of the job, in order.
    """
    wrong = missing(ended, expected)
    common = ended.losses.keys() & expected.losses.keys()
    differ = [i for i in common if abs(ended.losses[i][0] - expected.losses[i][0]) > CLOSE]
    wrong += [f"losses differ in iterations {sorted(differ, key=int)[:5]}"] if differ else []
    told = [event["iteration"] for event in events if event["type"] == "iteration"]
    wrong += [] if told == sorted(set(told)) else ["iterations were computed twice"]
    wrong += [f"a checkpoint was read: {event['reason']}" for event in events if event["type"] == "fallback"]
    tiers = {event["tier"] for event in events if event["type"] == "resume"}
    return wrong + [f"state came from {tier}" for tier in sorted(tiers - {"live", None}, key=str)]


def members(events: Sequence[dict]) -> list[int]:
    """Workers of each generation that has begun to train."""
    return [event["world_size"] for event in events if event["type"] == "start"]
