"""How many experts to save after faults: more, the more they have cost already."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

PLT_LIMIT = 0.0375
"""Up to this proportion of lost tokens, MoC finds no loss of accuracy (section 3.1.2, Figure 5)."""


@dataclass(frozen=True)
class DynamicK:
    """K, and what it has cost so far (MoC, section 5.3 and Figure 15(b)).

    After each recovery the tokens that it has lost are booked on K; when they pass K's share of the limit, K is
    doubled, until all experts are saved and nothing is lost any more.  MoC does not say how large the share of a K is.
    Here all have the same: from ``first`` on, K takes m values before it is N, and the limit has m + 1 shares.  What K
    costs beyond its share counts for the next one, so that all of them together cost at most m shares and the fault
    that passed the last of them; one share is left for that one.  So if no single fault costs more than a share, the
    PLT never passes the limit, however many faults there are.

    Attributes:
        k: experts of a layer that are saved now.
        num_experts: N, experts of a layer.
        limit: the proportion of lost tokens that must not be passed.
        first: K at the start of the run; by default ``k``.
        booked: PLT that counts for this K.

    Raises:
        ValueError: K does not fit the experts, or the limit is no proportion.
    """

    k: int
    num_experts: int
    limit: float = PLT_LIMIT
    first: int = 0
    booked: float = 0.0

    def __post_init__(self):
        if not self.first:
            object.__setattr__(self, "first", self.k)
        if not 1 <= self.first <= self.k <= self.num_experts:
            raise ValueError(f"K must be from 1 to {self.num_experts}, the experts of a layer, not {self.k}")
        if not 0 < self.limit <= 1:
            raise ValueError(
                f"a limit of {self.limit} for lost tokens is not possible: take one up to 1, such as 0.0375"
            )

    @property
    def share(self) -> float:
        """The PLT that each K may cost."""
        steps = (-(-self.num_experts // self.first) - 1).bit_length()  # how often K is doubled until it is N
        return self.limit / (steps + 1)

    def recovered(self, plt: float) -> DynamicK:
        """After a recovery.

        Args:
            plt: by how much it has raised the PLT of the whole training (eq. 7); of the tokens so far, one early fault
                would count as if all that follow were as near to the beginning.

        Raises:
            ValueError: it is negative.
        """
        if not plt >= 0:
            raise ValueError(f"a recovery cannot have lost a proportion of {plt} of the tokens")
        k, booked = self.k, self.booked + plt
        while k < self.num_experts and booked > self.share:
            k, booked = min(2 * k, self.num_experts), booked - self.share
        return dataclasses.replace(self, k=k, booked=booked)
