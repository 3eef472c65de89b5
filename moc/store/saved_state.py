"""``state`` in a manifest: the types of the fields that this package defines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moc.files.decode import Count, Name
from moc.state.record import StepRecord

_LARGEST_BATCH = 1 << 24  # samples of an iteration


@dataclass(frozen=True)
class SavedState:
    """Everything in a snapshot that is not a tensor; engines add fields, such as ``shape``, and check them.

    Attributes:
        iteration: iterations completed.
        consumed_samples: samples consumed.
        skipped_iterations: number of completed iterations without an update.
        record: step record of the last iteration; None at the start of a run.
        interval: state of the policy's interval.
        policy_state: state of the policy.
        ledger: state of the token ledger; None if tokens are not counted.
        auto: measurements and choice of ``--ckpt-policy auto``.
        alike: in a snapshot in memory, names of operators that several nodes save, by the number of nodes.
        copied: in a snapshot in memory, the operators that are copied to other nodes; None for all.
    """

    iteration: Count | None = None
    consumed_samples: Count = 0
    skipped_iterations: Count = 0
    record: StepRecord | None = None
    interval: dict[str, Any] | None = None
    policy_state: dict[str, Any] | None = None
    ledger: dict[str, Any] | None = None
    auto: dict[str, Any] | None = None
    alike: Mapping[Count, list[Name]] = field(default_factory=dict)
    copied: list[Name] | None = None

    def check(self, iteration: int) -> None:
        """Checks the iterations and samples of state and record against the manifest's iteration.

        Raises:
            ValueError: the values contradict each other.
        """
        for what, found in (("state", self.iteration), ("record", self.record and self.record.iteration)):
            if found is not None and found != iteration:
                raise ValueError(f"its {what} is of iteration {found}, not of {iteration}")
        if self.consumed_samples > _LARGEST_BATCH * max(iteration, 1) or self.skipped_iterations > iteration:
            samples, skipped = self.consumed_samples, self.skipped_iterations
            raise ValueError(f"{samples} samples and {skipped} skipped iterations cannot be those of {iteration}")
