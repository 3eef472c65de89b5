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
    """The formats of a training, by their names in :data:`BYTES`.

    Attributes:
        compute: of the weights that forward and backward compute with.
        master: of the weights that updates are added to.
        moments: of the optimizer's moments; Adam has two.

    Raises:
        ValueError: there is no such format.
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
"""The usual one, of which section 3.2 speaks: 12 bytes, and 2."""

TABLE_7 = (
    Precision("fp16", "fp16", ("fp16", "fp16")),
    Precision("fp8", "fp32", ("fp32", "fp32")),
    Precision("fp8", "fp16", ("fp32", "fp32")),
    Precision("fp8", "fp16", ("fp8", "fp16")),
    Precision("fp8", "fp8", ("fp8", "fp16")),
)
"""The five of the paper's Table 7, in its order."""


def operator_bytes(operators: Sequence[Operator], precision: Precision = MIXED) -> list[OperatorBytes]:
    """What each operator adds to a snapshot of the whole model, for :func:`moc.policy.window.find_window_size`."""
    full, compute = precision.full_bytes, precision.compute_bytes
    return [OperatorBytes(full * one.parameters, compute * one.parameters) for one in operators]
