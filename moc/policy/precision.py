"""Bytes of each parameter in a sparse snapshot, by the number formats of training (MoEvement, sections 3.2 and 5.7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moc.policy.window import OperatorBytes
from moc.state.operators import Operator

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes of a number, by format."""


@dataclass(frozen=True)
class Precision:
    """The number formats of a training run, by their names in :data:`BYTES`.

    Attributes:
        compute: format of the weights used in forward and backward.
        master: format of the weights that updates are added to.
        moments: formats of the optimizer's moments; Adam has two.

    Raises:
        ValueError: a format is unknown.
    """

    compute: str
    master: str
    moments: tuple[str, ...]

    def __post_init__(self):
        for name in (self.compute, self.master, *self.moments):
            if name not in BYTES:
                raise ValueError(f"there is no number format {name}: choose among {', '.join(BYTES)}")

    @property
    def full_bytes(self) -> int:
        """S_master + S_optim of Algorithm 1, for one parameter: what an active operator saves."""
        return BYTES[self.master] + sum(BYTES[name] for name in self.moments)

    @property
    def compute_bytes(self) -> int:
        """S_compute of Algorithm 1, for one parameter: what a frozen operator saves."""
        return BYTES[self.compute]


MIXED = Precision("fp16", "fp32", ("fp32", "fp32"))
"""The usual format, as in section 3.2: 12 bytes in full, 2 bytes of compute weights."""

TABLE_7 = (
    Precision("fp16", "fp16", ("fp16", "fp16")),
    Precision("fp8", "fp32", ("fp32", "fp32")),
    Precision("fp8", "fp16", ("fp32", "fp32")),
    Precision("fp8", "fp16", ("fp8", "fp16")),
    Precision("fp8", "fp8", ("fp8", "fp16")),
)
"""The five configurations of the paper's Table 7, in its order."""


def operator_bytes(operators: Sequence[Operator], precision: Precision = MIXED) -> list[OperatorBytes]:
    """Bytes that each operator adds to a snapshot of the model, for :func:`moc.policy.window.find_window_size`."""
    full, compute = precision.full_bytes, precision.compute_bytes
    return [OperatorBytes(full * one.parameters, compute * one.parameters) for one in operators]
