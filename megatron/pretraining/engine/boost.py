"""More capacity for experts that lost tokens to a recovery (MoEtion, section 6).

Tokens that such an expert would drop are processed after all, as long as other experts of its expert-parallel rank
leave slots unused: no rank processes more than its capacity, and no other expert's routing changes by a bit.
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
    """Tokens beyond its capacity that each expert processes; those that owe the most come first.

    Args:
        processed: tokens of each expert within its capacity, int64 (experts).
        dropped: tokens that it would drop.
        owed: tokens that it is to make up.
        capacity: of each expert.
        most: tokens by which an expert may exceed its capacity.
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
    """The tokens that each expert takes of those ``wanted``, bool (tokens, experts).

    The most probable, or without ``probabilities`` the first, as many as ``number`` (experts) says.
    """
    keys = torch.zeros(wanted.shape, device=wanted.device) if probabilities is None else probabilities.detach()
    order = keys.masked_fill(~wanted, -math.inf).argsort(dim=0, descending=True, stable=True)
    return wanted & (order.argsort(dim=0) < number)


class RouterBoost:
    """Boosts experts of one router until :meth:`close`.

    While boosted, the router itself drops nothing, and a hook drops what it would have dropped but for some tokens.
    Activation recomputation repeats the decision; evaluation is not boosted.

    Args:
        owed: tokens that each expert is to make up, over all ranks.
        fraction: of its capacity, by which an expert may exceed it.
    """

    def __init__(self, router: TopKRouter, owed: Sequence[int], fraction: float):
        self._router, self._config, self._fraction = router, router.config, fraction
        self._owed = torch.tensor(owed, dtype=torch.int64, device=router.weight.device)
        router.config = copy.copy(router.config)  # shared with all layers
        router.config.moe_expert_capacity_factor = None
        self._hook = router.register_forward_hook(self._drop, prepend=True)  # others see what remains

    def close(self) -> None:
        """Restores the router."""
        self._hook.remove()
        self._router.config = self._config

    def capacity(self, tokens: int) -> int:
        """The base capacity of each expert for so many tokens of a router."""
        factor, experts = self._config.moe_expert_capacity_factor, self._config.num_moe_experts
        assert factor is not None and experts is not None  # or nothing is dropped, and nothing boosted
        return get_capacity(tokens * self._router.topk, experts, factor)

    def _drop(self, router: TopKRouter, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]):
        config, (probabilities, routed) = self._config, output
        factor, policy = config.moe_expert_capacity_factor, config.moe_token_drop_policy
        assert factor is not None
        within_probabilities, within = apply_router_token_dropping(probabilities, routed, router.topk, factor, policy)
        dropped = routed & ~within
        if router.local_tokens_per_expert is not None and torch.is_grad_enabled():
            with torch.no_grad():  # for the router's bias, as if nothing were boosted
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
