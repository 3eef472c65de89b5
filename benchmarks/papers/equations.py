"""How large a checkpoint is in which only some experts are saved: MoC's equations 5 and 6, and its Table 3."""

from __future__ import annotations

from moc.sharding import StateBytes

TARGETS = ("weights", "optimizer", "both")
"""What of the experts that are not chosen is left out: MoC's W, O and WO (section 6.3, Table 3)."""


def pec_size(
    others: int, experts: int, k: float, num_experts: int, state: StateBytes, target: str = "both", keep_master=False
) -> float:
    """Bytes of a checkpoint with K experts of each layer (MoC, section 3.1.1, eq. 6); with all of them, eq. 5.

    Where the target is ``both``, it is (P_ne + K/N P_e) (B_w + B_o).  In general only the B_c bytes of the target are
    chosen, and the others of all experts are there: (P_ne + P_e) (B_w + B_o - B_c) + (P_ne + K/N P_e) B_c.

    Args:
        others: P_ne, parameters that are not in experts.
        experts: P_e, parameters in experts, of all layers.
        k: experts that are saved of each layer.
        num_experts: N, experts of each layer.
        state: bytes of each parameter.
        target: what is chosen; see :data:`TARGETS`.
        keep_master: the fp32 master weights of all experts are there whatever the target, as in Table 3.
    """
    optimizer = state.moments if keep_master else state.optimizer
    chosen = {"weights": state.weights, "optimizer": optimizer, "both": state.weights + optimizer}[target]
    always = state.weights + state.optimizer - chosen
    return (others + experts) * always + (others + k / num_experts * experts) * chosen
