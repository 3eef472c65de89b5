"""Counts the tokens that routers give to each expert; the vote sums the counts of all workers."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.router import TopKRouter

from megatron.pretraining.model.parameters import unwrap


class RouterCounts:
    """Counts the routed tokens of an iteration, and with ``probabilities`` sums their routing probabilities.

    A token dropped by an expert's capacity does not count for the expert, only as sent.  Activation recomputation does
    not count twice.  ``padded`` experts are filled up to their capacity with tokens that were not routed to them.
    """

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        layers: list[int],
        num_experts: int,
        padded: bool,
        device: torch.device,
        probabilities: bool = False,
    ):
        self._place = {layer: place for place, layer in enumerate(layers)}
        self._padded = padded
        self._counts = torch.zeros(len(layers), num_experts, dtype=torch.int64, device=device)
        self._sent = torch.zeros(len(layers), dtype=torch.int64, device=device)
        self._probabilities = torch.zeros(self._counts.shape, dtype=torch.float64, device=device)
        self._adds_up = probabilities
        routers = (m for chunk in chunks for m in unwrap(chunk).modules() if isinstance(m, TopKRouter))
        self._hooks = [router.register_forward_hook(self._count) for router in routers]

    def close(self) -> None:
        """Stops counting."""
        for hook in self._hooks:
            hook.remove()

    def take(self) -> dict[str, torch.Tensor]:
        """This worker's contributions to the vote since the last call, flat."""
        ballot = {"expert_tokens": self._counts.flatten().double(), "sent_tokens": self._sent.double()}
        if self._adds_up:
            ballot["expert_probabilities"] = self._probabilities.flatten().clone()
        for counter in (self._counts, self._sent, self._probabilities):
            counter.zero_()
        return ballot

    def by_layer(self, tally: dict[str, list[float]]) -> tuple[dict[int, list[int]], dict[int, int]]:
        """The voted counts by layer: tokens of each expert, and tokens sent times TopK."""
        experts, tokens = self._counts.shape[1], [int(n) for n in tally["expert_tokens"]]
        counts = {layer: tokens[place * experts :][:experts] for layer, place in self._place.items()}
        return counts, {layer: int(tally["sent_tokens"][place]) for layer, place in self._place.items()}

    def probabilities(self, tally: dict[str, list[float]]) -> dict[int, list[float]]:
        """The voted sums of routing probabilities by layer and expert, if these are summed."""
        sums, experts = tally["expert_probabilities"], self._counts.shape[1]
        return {layer: sums[place * experts :][:experts] for layer, place in self._place.items()}

    def _count(self, router: TopKRouter, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        probabilities, routed = output
        # with recomputation, the first forward pass runs without gradients; only the second counts
        if not router.training or not torch.is_grad_enabled():
            return
        if self._padded:
            routed = routed & (probabilities != 0)
        assert router.layer_number is not None  # the router belongs to a layer
        place = self._place[router.layer_number - 1]
        self._counts[place] += routed.detach().sum(dim=0)
        self._sent[place] += routed.shape[0] * router.topk
        if self._adds_up:
            self._probabilities[place] += (probabilities.detach() * routed).double().sum(dim=0)
