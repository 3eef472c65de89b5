"""The auxiliary losses of a step record, reduced by the vote instead of by extra collectives."""

from __future__ import annotations

from typing import Protocol

import torch


class AuxiliaryLosses(Protocol):
    """Collects further values that a forward pass reports, such as the losses of routers."""

    def take(self) -> dict[str, torch.Tensor]:
        """Returns this worker's contributions to the vote, and forgets them."""
        ...

    def drop(self) -> None:
        """Forgets an iteration that is not reported."""
        ...

    def means(self, vote: dict[str, float]) -> dict[str, float]:
        """The voted means by name."""
        ...
