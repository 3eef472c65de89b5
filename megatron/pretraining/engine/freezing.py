"""Freezes operators: they pass gradients to their inputs and receive no updates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from megatron.pretraining.engine.owned import drop_gradients, members
from megatron.pretraining.engine.zero.chunk import ZeroChunk
from megatron.pretraining.model.parameters import Pieces, unwrap
from moc.state.interface import FreezingError
from moc.state.operators import operator_of


class Freezer:
    """Freezes and activates operators of this rank's model chunks between iterations."""

    def __init__(self, chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer, pieces: Pieces):
        self._chunks, self._optimizer = chunks, optimizer
        self._skips_gradients = not any(isinstance(chunk, ZeroChunk) for chunk in chunks)
        self._operators = {  # owners of each parameter in the gradient buffers
            parameter: {operator_of(piece.name) for piece in described}
            for parameter, described in pieces.items()
            if described and (hasattr(parameter, "main_grad") or not self._skips_gradients)
        }
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.frozen: frozenset[str] = frozenset()

    def freeze(self, operators: Iterable[str]) -> None:
        """See :meth:`megatron.pretraining.engine.state.MegatronState.freeze`."""
        operators = set(operators)
        if operators and any(
            c.ddp_config.overlap_grad_reduce or c.ddp_config.overlap_param_gather for c in self._chunks
        ):
            raise FreezingError(
                "operators cannot be frozen while communication overlaps with computation. "
                "Fix: turn off --overlap-grad-reduce and --overlap-param-gather"
            )
        self._keep_frozen(self.frozen | operators)

    def activate(self, operators: Iterable[str]) -> None:
        """See :meth:`megatron.pretraining.engine.state.MegatronState.activate`."""
        self._keep_frozen(self.frozen - set(operators))

    def _keep_frozen(self, wanted: frozenset[str]) -> None:
        for owners in self._operators.values():
            if owners & wanted and not owners <= wanted:
                raise FreezingError(
                    f"{', '.join(sorted(owners))} share one parameter, and can only be frozen or activated together. "
                    "Fix: drop --moe-grouped-gemm, or name all of them"
                )
        for parameter, owners in self._operators.items():
            self._freeze_one(parameter, bool(owners & wanted))
        self.frozen = wanted
        if wanted and not self._hooks:
            self._hooks = [*self._optimizer_hooks(), *self._embedding_hooks()]
        elif not wanted:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def _freeze_one(self, parameter: Any, frozen: bool) -> None:
        if self._skips_gradients:
            parameter.requires_grad_(not frozen)
        else:  # DeepSpeed fills buckets as gradients arrive: missing gradients would regroup the sums of the others
            parameter.frozen = frozen

    def _optimizer_hooks(self):
        for member in members(self._optimizer):
            yield member.optimizer.register_step_pre_hook(lambda *_, member=member: drop_gradients(member))

    def _embedding_hooks(self):
        for model in map(unwrap, self._chunks):
            if getattr(model, "embedding", None) is not None:
                embedding: Any = model.embedding
                yield embedding.register_forward_hook(_let_gradients_through)


def _let_gradients_through(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
    # recomputed layers compute weight gradients only if their input requires a gradient, unlike a frozen embedding's
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()
