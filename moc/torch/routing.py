"""Counts the tokens that the routers of any module give to each expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moc.session.settings import SettingsError
from moc.torch.naming import Router

_NAMES = ("top_k", "num_experts_per_tok", "num_selected_experts")
"""Names under which modules and their configurations keep the experts of a token."""


class RouterCounter:
    """Implementation of :class:`moc.session.engine.RouterTally` by forward hooks.

    A router returns logits or probabilities with one column for each expert, the indices of the chosen experts, or a
    tuple with one of them.  Only forward passes with gradients count: an evaluation teaches experts nothing.

    Args:
        model: module of the routers.
        routers: its routers.
        layers: layers to count.
        top_k: experts of a token; None if router, module or configuration have it.

    Raises:
        SettingsError: a layer has no router, or the experts of a token are unknown.
    """

    def __init__(self, model: nn.Module, routers: Sequence[Router], layers: Sequence[int], top_k: int | None):
        router_of_layer = {router.layer: router for router in routers}
        if missing := [layer for layer in layers if layer not in router_of_layer]:
            raise SettingsError(
                f"layer {missing[0]} has experts and no router that was found, so their tokens cannot be counted. Fix: "
                "name it by operators={'...': 'layers.N.router'}, or choose a policy such as full",
                code="router-unknown",
            )
        self._experts = {layer: router_of_layer[layer].experts for layer in layers}
        self._counts = {layer: torch.zeros(count, dtype=torch.float64) for layer, count in self._experts.items()}
        self._sums = {layer: torch.zeros(count, dtype=torch.float64) for layer, count in self._experts.items()}
        self._hooks = []
        for layer in layers:
            path, number = router_of_layer[layer].module, top_k
            number = _top_k_of(model, path) if number is None else number
            hook = partial(self._count, layer, number)
            self._hooks.append(model.get_submodule(path).register_forward_hook(hook))

    def _count(self, layer: int, top_k: int, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():  # otherwise it evaluates, or a checkpointed forward pass is repeated with gradients
            with torch.no_grad():
                self._add(layer, top_k, output)

    def _add(self, layer: int, top_k: int, output: Any) -> None:
        outputs = [
            tensor for tensor in (output if isinstance(output, tuple | list) else [output]) if torch.is_tensor(tensor)
        ]
        experts = self._experts[layer]
        chosen = next(
            (tensor for tensor in outputs if not tensor.is_floating_point() and tensor.dtype is not torch.bool), None
        )
        weights = next(
            (tensor for tensor in outputs if tensor.is_floating_point() and tensor.shape[-1] == experts), None
        )
        if chosen is None:
            if weights is None:
                return
            chosen = weights.topk(top_k, -1).indices
        # on the device of the router: reading values would wait for it in each forward pass
        numbers = torch.arange(experts, device=chosen.device)
        self._counts[layer] = self._counts[layer].to(chosen.device) + (chosen.reshape(-1, 1) == numbers).sum(0)
        if weights is not None:
            weights = weights.reshape(-1, experts).double()
            shares = torch.where((weights >= 0).all(), weights, weights.softmax(-1))
            selected = torch.zeros_like(shares).scatter_(1, chosen.reshape(len(shares), -1), 1.0)
            self._sums[layer] = self._sums[layer].to(chosen.device) + (shares * selected).sum(0)

    def take(self) -> dict[str, Tensor]:
        """Returns this worker's counts since the last call, for the commit all-reduce."""
        contributions = {f"tokens_of_{layer}": counts.clone() for layer, counts in self._counts.items()}
        contributions |= {f"probabilities_of_{layer}": sums.clone() for layer, sums in self._sums.items()}
        for values in (*self._counts.values(), *self._sums.values()):
            values.zero_()
        return contributions

    def by_layer(self, totals: Mapping) -> tuple[dict[int, list[int]], dict[int, int]]:
        """Returns, by layer, the tokens of each expert, and their sum."""
        counts = {layer: [int(count) for count in totals[f"tokens_of_{layer}"]] for layer in self._experts}
        return counts, {layer: sum(row) for layer, row in counts.items()}

    def probabilities(self, totals: Mapping) -> dict[int, list[float]]:
        """Returns, by layer and expert, the sum of the gating probabilities over the expert's tokens."""
        return {layer: totals[f"probabilities_of_{layer}"] for layer in self._experts}

    def boost(self, debt: Mapping[int, Sequence[int]], fraction: float) -> None:
        """Has no effect: experts of any module have no known capacity."""

    def beyond(self, totals: Mapping) -> dict[int, list[int]]:
        """Returns nothing: no expert is boosted."""
        return {}

    def close(self) -> None:
        """Stops counting."""
        for hook in self._hooks:
            hook.remove()


def _top_k_of(model: nn.Module, router: str) -> int:
    parts = router.split(".")
    above = [model.get_submodule(".".join(parts[:end])) for end in range(len(parts), -1, -1)]
    for module in above:
        for owner in (module, getattr(module, "config", None)):
            for name in _NAMES:
                if isinstance(number := getattr(owner, name, None), int):
                    return number
    raise SettingsError(
        f"the router {router} has no number of experts per token. Fix: give top_k to protect()",
        code="router-unknown",
    )
