"""Saves the full model in each snapshot, as the dense baselines do."""

from __future__ import annotations

from dataclasses import dataclass

from moc.policy.interface import Load, Policy, SnapshotPlan, full_plan
from moc.policy.registry import policy


@policy("full")
@dataclass(frozen=True)
class Full(Policy):
    """Saves every operator in full whenever the interval is due.

    Megatron-DeepSpeed's blocking save, CheckFreq (Mohan et al., FAST 2021) and Gemini (Wang et al., SOSP 2023) all save
    this. They differ in tier and in blocking, which no policy decides.
    """

    def plan(self, iteration: int, load: Load | None = None) -> SnapshotPlan | None:
        """Returns the full model if a snapshot is due, regardless of load."""
        return full_plan(self, iteration) if self.interval.is_due(iteration) else None
