"""Raises the number of saved experts with the cost of past faults (Dynamic-K)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from moc.policy.errors import PolicyError

PLT_LIMIT = 0.0375
"""PLT up to which MoC finds no loss of accuracy (section 3.1.2, Figure 5)."""


@dataclass(frozen=True)
class DynamicK:
    """K and its cost so far (MoC, section 5.3 and Figure 15(b)).

    Each recovery adds its lost tokens to the cost of K. When the cost exceeds K's share of the limit, K doubles, until
    all experts are saved and nothing is lost. MoC does not specify the share of a K. Here all shares are equal: from
    ``first`` on, K takes m values before it reaches N, and the limit is divided into m + 1 shares.

    Cost beyond a share is added to the next K. So all K together cost at most m shares and the fault that exceeded the
    last one, for which one share is reserved. If no single fault costs more than a share, the PLT never exceeds the
    limit, however many faults occur.

    Attributes:
        k: experts of each layer saved now.
        num_experts: N, experts of a layer.
        limit: maximum proportion of lost tokens.
        first: K at the start of the run; by default ``k``.
        booked: PLT booked on this K.

    Raises:
        ValueError: K is not between 1 and N, or the limit is not in (0, 1].
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
            raise PolicyError(
                f"K = {self.k} is not possible with {self.num_experts} experts in a layer. Fix: set K from 1 to "
                f"{self.num_experts}",
                code="experts-per-snapshot-invalid",
            )
        if not 0 < self.limit <= 1:
            raise PolicyError(
                f"a limit of {self.limit} for lost tokens is not possible. Fix: take one up to 1, such as 0.0375",
                code="value-out-of-range",
            )

    @property
    def share(self) -> float:
        """The PLT that each K may cost."""
        steps = (-(-self.num_experts // self.first) - 1).bit_length()  # doublings of K until it is N
        return self.limit / (steps + 1)

    def recovered(self, plt: float) -> DynamicK:
        """Returns the state after a recovery.

        ``plt`` is the increase of the PLT over the whole training (eq. 7): relative to the tokens so far, an early
        fault would weigh too much.

        Raises:
            ValueError: ``plt`` is negative.
        """
        if not plt >= 0:
            raise PolicyError(
                f"a recovery cannot have lost a proportion of {plt} of the tokens. Fix: report one from 0 to 1",
                code="tokens-not-counted",
            )
        k, booked = self.k, self.booked + plt
        while k < self.num_experts and booked > self.share:
            k, booked = min(2 * k, self.num_experts), booked - self.share
        return dataclasses.replace(self, k=k, booked=booked)
