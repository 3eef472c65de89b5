"""Snapshot sizes of a run, queried from its workers once for all policies."""

from __future__ import annotations

from collections.abc import Sequence

from moc.policy.interval import Every
from moc.policy.pec import Pec
from moc.policy.pec_tuner import PecTuner
from moc.policy.plan import Busiest
from moc.policy.sparse import Sparse
from moc.policy.window import OperatorBytes
from moc.state.operators import Operator


def busiest_by_experts(busiest: Busiest, operators: Sequence[Operator], ep: int) -> dict[int, int]:
    """Bytes of the rank that saves most, by number of experts saved per layer; empty without experts."""
    policy = Pec(operators, Every(1), auto=True, ep=ep)
    policy.on_sizes(busiest)
    assert isinstance(policy.interval, PecTuner)  # which chooses K
    return dict(policy.interval.busiest)


def operators_by_stage(
    busiest: Busiest, operators: Sequence[Operator], ep: int, stages: tuple[int, ...]
) -> list[list[OperatorBytes]]:
    """Bytes that each operator adds to a snapshot, by pipeline stage, in an order in which they are saved."""
    policy = Sparse(operators, Every(1), ep=ep, stages=stages)
    policy.on_sizes(busiest)
    return policy.by_stage()
