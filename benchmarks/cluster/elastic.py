"""An elastic job on a cluster: its flags, and checks of its result when hosts fail and are not replaced."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.faults.run import End, missing

HOSTS, LEAST = 5, 3
CLOSE = 1e-5
FLAGS = """--calculate-per-token-loss --elastic --elastic-slots 6 --elastic-min-replicas 3
    --elastic-rebalance-interval 10 --use-distributed-optimizer --lr 1e-4"""
"""Flags that allow any two of five hosts to fail simultaneously: each expert and optimizer shard is on three hosts.

With a higher learning rate, the model memorizes its samples, and after 80 iterations rounding differences grow tenfold
every ten iterations.
"""


def as_of_fixed_members(ended: End, expected: End, events: Sequence[dict]) -> list[str]:
    """Returns the differences between a job whose members change and a job with fixed members, one sentence each.

    Args:
        ended: final state of the job.
        expected: final state of a job with fixed members.
        events: events of the job, in order.
    """
    wrong = missing(ended, expected)
    common = ended.losses.keys() & expected.losses.keys()
    differ = [i for i in common if abs(ended.losses[i][0] - expected.losses[i][0]) > CLOSE]
    wrong += [f"losses differ in iterations {sorted(differ, key=int)[:5]}"] if differ else []
    told = [event["iteration"] for event in events if event["type"] == "iteration"]
    wrong += [] if told == sorted(set(told)) else ["iterations were computed twice"]
    wrong += [f"a checkpoint was read: {event['reason']}" for event in events if event["type"] == "fallback"]
    tiers = {event["tier"] for event in events if event["type"] == "resume"}
    return wrong + [f"state was loaded from {tier}" for tier in sorted(tiers - {"live", None}, key=str)]


def members(events: Sequence[dict]) -> list[int]:
    """Returns the number of workers of each generation that has started to train."""
    return [event["world_size"] for event in events if event["type"] == "start"]
