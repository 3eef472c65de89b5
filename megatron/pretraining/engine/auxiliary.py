"""Reduces the auxiliary losses of a step record in the commit all-reduce instead of extra collectives."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class AuxiliaryLosses(Protocol):
    """Collects further values that a forward pass reports, such as the losses of routers."""

    def take(self, iteration: int) -> dict[str, torch.Tensor]:
        """Returns this worker's contributions to the commit all-reduce of an iteration, and clears them."""
        ...

    def drop(self) -> None:
        """Clears the values of an iteration that is not reported."""
        ...

    def means(self, vote: dict[str, Any]) -> dict[str, float]:
        """Returns the means by name, from the totals of the commit all-reduce."""
        ...
