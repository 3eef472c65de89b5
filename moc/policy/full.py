"""All of the model at once: what the dense baselines save."""

from __future__ import annotations

from dataclasses import dataclass

from moc.policy.plan import Load, Policy, SnapshotPlan
from moc.policy.registry import policy


@policy("full")
@dataclass(frozen=True)
class Full(Policy):
    """Every operator in full, whenever the interval says so.

    Megatron-DeepSpeed's blocking save, CheckFreq (Mohan et al., FAST 2021) and Gemini (Wang et al., SOSP 2023) all
    save this; they differ in where it goes and in what training waits for, which is no business of a policy.
    """

    def plan(self, iteration: int, load: Load | None = None) -> SnapshotPlan | None:
        """All of the model where one is due; the load does not matter."""
        return self.everything(iteration) if self.interval.due(iteration) else None
