"""Computes the size of checkpoints with some of the experts: MoC's equations 5 and 6, and its Table 3."""

from __future__ import annotations

from moc.sharding import StateBytes

TARGETS = ("weights", "optimizer", "both")
"""State that is omitted for unselected experts: MoC's W, O and WO (section 6.3, Table 3)."""


def pec_size(
    others: int, experts: int, k: float, num_experts: int, state: StateBytes, target: str = "both", keep_master=False
) -> float:
    """Returns the bytes of a checkpoint with K experts of each layer (MoC, section 3.1.1, eq. 6); eq. 5 if K is N.

    With target ``both`` it is (P_ne + K/N P_e) (B_w + B_o). In general only the B_c bytes of the target are selected,
    and all experts save the others: (P_ne + P_e) (B_w + B_o - B_c) + (P_ne + K/N P_e) B_c.

    Args:
        others: P_ne, parameters outside experts.
        experts: P_e, parameters in experts, over all layers.
        k: experts saved of each layer.
        num_experts: N, experts of each layer.
        state: bytes of each parameter.
        target: selected state; see :data:`TARGETS`.
        keep_master: save the fp32 master weights of all experts for every target, as in Table 3.
    """
    optimizer = state.moments if keep_master else state.optimizer
    chosen = {"weights": state.weights, "optimizer": optimizer, "both": state.weights + optimizer}[target]
    always = state.weights + state.optimizer - chosen
    return (others + experts) * always + (others + k / num_experts * experts) * chosen
