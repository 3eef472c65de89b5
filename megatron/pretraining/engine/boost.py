"""Adds capacity for experts that lost tokens to a recovery (MoEtion, section 6).

Tokens that such an expert would drop are processed while other experts of its expert-parallel rank leave capacity
unused. No rank processes more than its capacity, and the routing of other experts stays bit-identical.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping, get_capacity
from megatron.core.transformer.moe.router import TopKRouter


def slots_beyond(
    processed: torch.Tensor, dropped: torch.Tensor, owed: torch.Tensor, capacity: int, most: int, ranks: int
) -> torch.Tensor:
    """Returns the tokens beyond its capacity that each expert processes; the highest token debt has priority.

    Args:
        processed: tokens of each expert within its capacity, int64 (experts).
        dropped: tokens that each expert would drop.
        owed: token debt of each expert.
        capacity: capacity of each expert.
        most: maximum tokens of an expert beyond its capacity.
        ranks: expert-parallel ranks, each with an equal part of the experts, in order.
    """
    unused = (capacity - processed).view(ranks, -1).clamp(min=0).sum(dim=1, keepdim=True)
    owed, dropped = owed.view(ranks, -1), dropped.view(ranks, -1)
    order = owed.argsort(dim=1, descending=True, stable=True)
    asked = dropped.minimum(owed).clamp(max=most).gather(1, order)
    before = asked.cumsum(dim=1) - asked
    given = asked.minimum((unused - before).clamp(min=0))
    return torch.zeros_like(asked).scatter(1, order, given).flatten()


def first_of(wanted: torch.Tensor, probabilities: torch.Tensor | None, number: torch.Tensor) -> torch.Tensor:
    """Selects up to ``number`` (experts) tokens of each expert from ``wanted``, bool (tokens, experts).

    Selects the most probable tokens; without ``probabilities``, the first ones.
    """
    keys = torch.zeros(wanted.shape, device=wanted.device) if probabilities is None else probabilities.detach()
    order = keys.masked_fill(~wanted, -math.inf).argsort(dim=0, descending=True, stable=True)
    return wanted & (order.argsort(dim=0) < number)


class RouterBoost:
    """Boosts experts of one router until :meth:`close`.

    While boosted, the router itself drops no tokens.  A hook drops the tokens that exceed the boosted capacity.
    Activation recomputation repeats the decision; evaluation is not boosted.

    Args:
        owed: token debt of each expert, over all ranks.
        fraction: part of its capacity by which an expert may exceed it.
    """

    def __init__(self, router: TopKRouter, owed: Sequence[int], fraction: float):
        self._router, self._config, self._fraction = router, router.config, fraction
        self._owed = torch.tensor(owed, dtype=torch.int64, device=router.weight.device)
        router.config = copy.copy(router.config)  # the original is shared by all layers
        router.config.moe_expert_capacity_factor = None
        self._hook = router.register_forward_hook(self._drop, prepend=True)  # before other hooks

    def close(self) -> None:
        """Restores the router."""
        self._hook.remove()
        self._router.config = self._config

    def capacity(self, tokens: int) -> int:
        """Returns the base capacity of each expert for ``tokens`` tokens of a router."""
        factor, experts = self._config.moe_expert_capacity_factor, self._config.num_moe_experts
        assert factor is not None and experts is not None  # set if tokens are dropped, which boosting requires
        return get_capacity(tokens * self._router.topk, experts, factor)

    def _drop(self, router: TopKRouter, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]):
        config, (probabilities, routed) = self._config, output
        factor, policy = config.moe_expert_capacity_factor, config.moe_token_drop_policy
        assert factor is not None
        within_probabilities, within = apply_router_token_dropping(probabilities, routed, router.topk, factor, policy)
        dropped = routed & ~within
        if router.local_tokens_per_expert is not None and torch.is_grad_enabled():
            with torch.no_grad():  # for the router's bias, as without the boost
                router.local_tokens_per_expert -= dropped.sum(dim=0)
        if not router.training:
            return within_probabilities, within
        capacity = self.capacity(len(routed))
        number = slots_beyond(
            within.sum(dim=0),
            dropped.sum(dim=0),
            self._owed,
            capacity,
            math.ceil(capacity * self._fraction),
            config.expert_model_parallel_size,
        )
        taken = within | first_of(dropped, probabilities if policy == "probs" else None, number)
        return probabilities * taken, taken
