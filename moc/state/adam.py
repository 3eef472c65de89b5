"""Adam's update from saved gradients, without the engine: MoEtion's recomputation of the optimizer (section 5.2).

The arithmetic is torch's own, so the result is bit-identical to torch's Adam or AdamW on the same device, and close to
an optimizer with other kernels.  It is elementwise, so splitting a parameter does not change the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.optim.adam import adam

from moc.files import decode
from moc.files.decode import Amount

MASTER, MEAN, SQUARE = "master", "exp_avg", "exp_avg_sq"
SLOTS = frozenset({MASTER, MEAN, SQUARE})


@dataclass(frozen=True)
class Rule:
    """How the next update treats a parameter.

    Attributes:
        lr: learning rate.
        weight_decay: weight decay of the parameter; 0 if none is applied.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        decoupled: weight decay is decoupled from the gradient (AdamW).
    """

    lr: Amount
    weight_decay: Amount
    beta1: Amount
    beta2: Amount
    eps: Amount
    decoupled: bool


@dataclass(frozen=True)
class Rules:
    """How the next update treats experts.

    Attributes:
        clip_grad: maximum norm of gradients; 0 for no clipping.
        by_kind: rules by :func:`kind_of`; a kind whose parameters differ is absent.
    """

    clip_grad: Amount
    by_kind: Mapping[str, Rule]

    def to_plain(self) -> dict[str, Any]:
        """Returns JSON-compatible values."""
        return {"clip_grad": self.clip_grad, "by_kind": {kind: asdict(rule) for kind, rule in self.by_kind.items()}}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Rules:
        """Inverts :meth:`to_plain`; raises ValueError for other values."""
        return decode.convert(plain, cls)

    @classmethod
    def of(cls, clip_grad: float, rules: Iterable[tuple[str, Rule]]) -> Rules:
        """Merges the rules of parameters into one for each kind whose parameters all have the same rule."""
        rules_by_kind: dict[str, set[Rule]] = {}
        for kind, rule in rules:
            rules_by_kind.setdefault(kind, set()).add(rule)
        return cls(clip_grad, {kind: of_kind.pop() for kind, of_kind in rules_by_kind.items() if len(of_kind) == 1})


def kind_of(name: str) -> str:
    """Returns a parameter's name without the numbers of its layer and expert, so that it is equal for all experts."""
    return ".".join(part for part in name.split(".") if not part.isdecimal())


def gradient_factor(grad_norm: float, clip_grad: float, loss_scale: float) -> float:
    """Returns the factor on the reduced gradients that removes the loss scale and clips by the global norm."""
    clip = clip_grad / (grad_norm + 1.0e-6) if clip_grad > 0.0 else 1.0
    return min(clip, 1.0) / loss_scale


@torch.no_grad()
def update(state: Mapping[str, torch.Tensor], gradient: torch.Tensor, step: int, rule: Rule, factor: float) -> None:
    """Updates master weights and moments in place.

    Args:
        state: tensors of one shape by slot, fp32, on the host.
        gradient: reduced, unclipped and still scaled, in the dtype of its reduction; of the same shape.
        step: number of updates of the moments before this one.
        rule: rule of the parameter before this update.
        factor: see :func:`gradient_factor`.

    Raises:
        ValueError: the state is not Adam's in fp32.
    """
    if state.keys() != SLOTS or any(values.dtype != torch.float32 for values in state.values()):
        raise ValueError("its state is not Adam's in fp32")
    if not math.isfinite(factor):
        raise ValueError(f"its gradients would be multiplied by {factor}")
    adam(
        [state[MASTER]],
        [gradient.float() * factor],
        [state[MEAN]],
        [state[SQUARE]],
        [],
        [torch.tensor(float(step))],
        foreach=False,
        amsgrad=False,
        beta1=rule.beta1,
        beta2=rule.beta2,
        lr=rule.lr,
        weight_decay=rule.weight_decay,
        eps=rule.eps,
        maximize=False,
        decoupled_weight_decay=rule.decoupled,
    )
