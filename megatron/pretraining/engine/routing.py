"""Counts the tokens of each expert, and changes expert capacity.

The commit all-reduce sums the counts of all workers.

Adds capacity for experts that lost tokens to a recovery (MoEtion, section 6). Tokens that such an expert would drop
are processed while other experts of its expert-parallel rank leave capacity unused. No rank processes more than its
capacity, and the routing of other experts stays bit-identical.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping, get_capacity
from megatron.core.transformer.moe.router import TopKRouter

from megatron.pretraining.model.parameters import unwrap


def slots_beyond(
    processed: torch.Tensor, dropped: torch.Tensor, debt: torch.Tensor, capacity: int, max_excess: int, ranks: int
) -> torch.Tensor:
    """Returns the tokens beyond its capacity that each expert processes; the highest token debt has priority.

    Args:
        processed: tokens of each expert within its capacity, int64 (experts).
        dropped: tokens that each expert would drop.
        debt: token debt of each expert.
        capacity: capacity of each expert.
        max_excess: maximum tokens of an expert beyond its capacity.
        ranks: expert-parallel ranks, each with an equal part of the experts, in order.
    """
    unused = (capacity - processed).view(ranks, -1).clamp(min=0).sum(dim=1, keepdim=True)
    debt, dropped = debt.view(ranks, -1), dropped.view(ranks, -1)
    order = debt.argsort(dim=1, descending=True, stable=True)
    requested = dropped.minimum(debt).clamp(max=max_excess).gather(1, order)
    before = requested.cumsum(dim=1) - requested
    granted = requested.minimum((unused - before).clamp(min=0))
    return torch.zeros_like(requested).scatter(1, order, granted).flatten()


def first_of(candidates: torch.Tensor, probabilities: torch.Tensor | None, number: torch.Tensor) -> torch.Tensor:
    """Selects up to ``number`` (experts) tokens of each expert from ``candidates``, bool (tokens, experts).

    Selects the most probable tokens; without ``probabilities``, the first ones.
    """
    keys = torch.zeros(candidates.shape, device=candidates.device) if probabilities is None else probabilities.detach()
    order = keys.masked_fill(~candidates, -math.inf).argsort(dim=0, descending=True, stable=True)
    return candidates & (order.argsort(dim=0) < number)


class RouterBoost:
    """Boosts experts of one router until :meth:`close`.

    While boosted, the router itself drops no tokens.  A hook drops the tokens that exceed the boosted capacity.
    Activation recomputation repeats the decision; evaluation is not boosted.

    Args:
        debt: part of the token debt of each expert that one call of this router may make up.
        fraction: maximum excess of an expert, relative to its capacity.
    """

    def __init__(self, router: TopKRouter, debt: Sequence[int], fraction: float):
        self._router, self._config, self._fraction = router, router.config, fraction
        self._debt = torch.tensor(debt, dtype=torch.int64, device=router.weight.device)
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
            self._debt,
            capacity,
            int(capacity * self._fraction),
            config.expert_model_parallel_size,
        )
        selected = within | first_of(dropped, probabilities if policy == "probs" else None, number)
        return probabilities * selected, selected


class RouterCounts:
    """Counts the routed tokens of an iteration, and with ``probabilities`` sums their routing probabilities.

    A token that an expert's capacity drops counts only as sent.  Tokens beyond the capacity, with :meth:`boost`, count
    for the expert, and also separately.  Activation recomputation does not count twice.  ``padded`` experts are filled
    up to their capacity with tokens that were not routed to them; these do not count.

    Args:
        chunks: model chunks of this worker.
        layers: numbers of the layers on all workers.
        num_experts: experts of a layer.
        padded: as above.
        device: device of the counts.
        probabilities: as above.
        calls: calls of a layer's routers in an iteration, over all workers. A boost divides token debts among them, so
            that an iteration never exceeds a debt; up to ``calls`` - 1 tokens of it are not made up.
    """

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        layers: list[int],
        num_experts: int,
        padded: bool,
        device: torch.device,
        probabilities: bool = False,
        calls: int = 1,
    ):
        self._row_of = {layer: row for row, layer in enumerate(layers)}
        self._padded = padded
        self._counts = torch.zeros(len(layers), num_experts, dtype=torch.int64, device=device)
        self._sent = torch.zeros(len(layers), dtype=torch.int64, device=device)
        self._probabilities = torch.zeros(self._counts.shape, dtype=torch.float64, device=device)
        self._sums_probabilities, self._calls = probabilities, calls
        self._beyond = torch.zeros_like(self._counts)
        self._boosted, self._boosts = False, {}
        self._routers = [m for chunk in chunks for m in unwrap(chunk).modules() if isinstance(m, TopKRouter)]
        self._hooks = [router.register_forward_hook(self._count) for router in self._routers]

    def close(self) -> None:
        """Stops counting and boosting."""
        self.boost({}, 0.0)
        for hook in self._hooks:
            hook.remove()

    def boost(self, debt: Mapping[int, Sequence[int]], fraction: float) -> None:
        """Implements :meth:`moc.session.engine.RouterTally.boost`."""
        for boost in self._boosts.values():
            boost.close()
        self._boosted = bool(debt)
        shares = {layer: [tokens // self._calls for tokens in row] for layer, row in debt.items()}
        self._boosts = {
            layer: RouterBoost(router, shares[layer], fraction)
            for router in self._routers
            if any(shares.get(layer := _layer_of(router), ()))
        }

    def take(self) -> dict[str, torch.Tensor]:
        """Returns this worker's flat contributions to the commit all-reduce since the last call."""
        contribution = {"expert_tokens": self._counts.flatten().double(), "sent_tokens": self._sent.double()}
        if self._sums_probabilities:
            contribution["expert_probabilities"] = self._probabilities.flatten().clone()
        if self._boosted:
            contribution["tokens_beyond"] = self._beyond.flatten().double()
        for counter in (self._counts, self._sent, self._beyond, self._probabilities):
            counter.zero_()
        return contribution

    def by_layer(self, totals: dict[str, list[float]]) -> tuple[dict[int, list[int]], dict[int, int]]:
        """Returns the totals by layer: tokens of each expert, and tokens sent times TopK."""
        sent = {layer: int(totals["sent_tokens"][row]) for layer, row in self._row_of.items()}
        return self._table(totals["expert_tokens"]), sent

    def beyond(self, totals: dict[str, list[float]]) -> dict[int, list[int]]:
        """Returns the total tokens of each expert beyond its capacity, by layer; empty without a boost."""
        return self._table(totals["tokens_beyond"]) if "tokens_beyond" in totals else {}

    def probabilities(self, totals: dict[str, list[float]]) -> dict[int, list[float]]:
        """Returns the total routing probabilities by layer and expert, if they are summed."""
        sums, experts = totals["expert_probabilities"], self._counts.shape[1]
        return {layer: sums[row * experts :][:experts] for layer, row in self._row_of.items()}

    def _table(self, flat: list[float]) -> dict[int, list[int]]:
        experts, tokens = self._counts.shape[1], [int(n) for n in flat]
        return {layer: tokens[row * experts :][:experts] for layer, row in self._row_of.items()}

    def _count(self, router: TopKRouter, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        probabilities, routed = output
        # with recomputation, the first forward pass runs without gradients; only the second counts
        if not router.training or not torch.is_grad_enabled():
            return
        if self._padded:
            routed = routed & (probabilities != 0)
        layer, tokens = _layer_of(router), routed.detach().sum(dim=0)
        row = self._row_of[layer]
        self._counts[row] += tokens
        if layer in self._boosts:
            self._beyond[row] += (tokens - self._boosts[layer].capacity(len(routed))).clamp(min=0)
        self._sent[row] += routed.shape[0] * router.topk
        if self._sums_probabilities:
            self._probabilities[row] += (probabilities.detach() * routed).double().sum(dim=0)


def _layer_of(router: TopKRouter) -> int:
    """Returns the layer that a router belongs to, counted from 0."""
    assert router.layer_number is not None  # every router belongs to one
    return router.layer_number - 1


@dataclass(frozen=True)
class ExpertLoad:
    """Load of the experts over some iterations.

    Attributes:
        tokens: tokens that each expert received, by number of the layer.
        sent: tokens times TopK that routers sent, by number of the layer.
    """

    tokens: Mapping[int, Sequence[float]]
    sent: Mapping[int, float]

    @property
    def violations(self) -> dict[int, float]:
        """Maximum violation of each layer: its largest load divided by its mean load, minus 1."""
        return {
            layer: max(row) * len(row) / total - 1 if (total := sum(row)) else 0.0 for layer, row in self.tokens.items()
        }

    @property
    def dropped(self) -> dict[int, float]:
        """Share of the tokens of each layer that no expert received, because of the capacity."""
        return {
            layer: 1 - sum(row) / self.sent[layer] if self.sent[layer] else 0.0 for layer, row in self.tokens.items()
        }


class LoadCounter:
    """Counts the tokens of experts on the device, for the iterations since the last report.

    Args:
        chunks: model chunks of this worker.
        device: device of the counts.
        padded: as for :class:`RouterCounts`.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], device: torch.device, padded: bool):
        core: Any = unwrap(chunks[0]).config
        routers = [m for chunk in chunks for m in unwrap(chunk).modules() if isinstance(m, TopKRouter)]
        self._padded, self.experts = padded, core.num_moe_experts or 0
        self.layers = [number_of(router) for router in routers]
        self._pending = torch.zeros(len(routers), self.experts, dtype=torch.int64, device=device)
        self._sum = torch.zeros_like(self._pending)
        self._pending_sent, self._sent = [0] * len(routers), [0] * len(routers)
        self._hooks = [
            router.register_forward_hook(partial(self._count, index)) for index, router in enumerate(routers)
        ]

    def close(self) -> None:
        """Stops counting."""
        for hook in self._hooks:
            hook.remove()

    def keep(self) -> None:
        """Adds the counts of a complete iteration to the report."""
        self._sum += self._pending
        self._sent = [a + b for a, b in zip(self._sent, self._pending_sent, strict=True)]
        self.drop()

    def drop(self) -> None:
        """Discards the counts of an iteration that is not reported."""
        self._pending.zero_()
        self._pending_sent = [0] * len(self._pending_sent)

    def take(self, layers: Sequence[int]) -> torch.Tensor:
        """Returns and clears this worker's part of a report.

        Returns:
            float64 of shape ``[len(layers) * (experts + 1)]``: tokens of each expert, and tokens sent.
        """
        table = torch.zeros(len(layers), self.experts + 1, dtype=torch.float64, device=self._sum.device)
        for index, layer in enumerate(self.layers):
            table[layers.index(layer), :-1] += self._sum[index]
            table[layers.index(layer), -1] += self._sent[index]
        self._sum.zero_()
        self._sent = [0] * len(self._sent)
        return table.flatten()

    def load(self, layers: Sequence[int], totals: Sequence[float]) -> ExpertLoad:
        """Returns the load in the sum of all workers' parts."""
        width = self.experts + 1
        rows = {layer: totals[index * width :][:width] for index, layer in enumerate(layers)}
        return ExpertLoad({n: row[:-1] for n, row in rows.items()}, {n: row[-1] for n, row in rows.items()})

    def _count(self, index: int, router: TopKRouter, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        if not router.training or not torch.is_grad_enabled():  # as in RouterCounts
            return
        probabilities, routed = output
        if self._padded:
            routed = routed & (probabilities != 0)
        self._pending[index] += routed.detach().sum(dim=0)
        self._pending_sent[index] += routed.shape[0] * router.topk


def number_of(router: TopKRouter) -> int:
    """Returns the layer of a router, counted from 0; depths of multi-token prediction follow the layers."""
    return _layer_of(router) + (router.config.num_layers if router.is_mtp_layer else 0)


class AuxiliaryLosses(Protocol):
    """Collects further values that a forward pass reports, such as the losses of routers.

    Attributes:
        loss_name: name of the loss; empty on stages that compute none.
    """

    loss_name: str

    def take(self, iteration: int) -> dict[str, torch.Tensor]:
        """Returns this worker's contributions to the commit all-reduce of an iteration, and clears them."""
        ...

    def drop(self) -> None:
        """Clears the values of an iteration that is not reported."""
        ...

    def means(self, totals: dict[str, Any]) -> dict[str, float]:
        """Returns the means by name, from the totals of the commit all-reduce."""
        ...
