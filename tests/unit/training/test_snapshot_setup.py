"""What snapshots in the memory of nodes cannot have: what several nodes hold alike."""

from megatron.training import cpu

cpu.install()

import pytest  # noqa: E402

from megatron.training.snapshot_setup import _check_nodes  # noqa: E402
from megatron.training.snapshot_tiers import Tiers  # noqa: E402
from moc.policy import Every  # noqa: E402
from moc.policy.full import Full  # noqa: E402
from moc.policy.sparse import Sparse  # noqa: E402
from moc.sharding.shares import Holding, Stage  # noqa: E402
from moc.state.operators import Operator  # noqa: E402
from moc.store.errors import CheckpointError  # noqa: E402

OPERATORS = [Operator("output", "output", None, None, 10)]
SHARED = Holding("output", "compute", "param", "weights", 40, 40)
REPLICATED = Holding("output", "full", "optimizer", "state", 120, 120)
OWN = Holding("output", "full", "optimizer", "", 60, 0)


def check(policy, holdings, *nodes):
    node = tuple(rank for rank, name in enumerate(nodes) if name == nodes[0])
    _check_nodes(Stage({0: holdings, 1: holdings}), policy, Tiers(None, None, nodes, True, node, None, 2), "memory")


def test_weights_that_nodes_hold_alike_are_refused_where_they_are_saved():
    full, sparse = Full(OPERATORS, Every(1)), Sparse(OPERATORS, None)
    check(full, [OWN, SHARED], "a", "b")
    check(sparse, [OWN, SHARED], "a", "a")
    with pytest.raises(
        CheckpointError, match="memory cannot save output, which several.*same weights inside of a node"
    ):
        check(sparse, [OWN, SHARED], "a", "b")


def test_replicated_state_is_refused_with_every_policy():
    for policy in (Full(OPERATORS, Every(1)), Sparse(OPERATORS, None)):
        with pytest.raises(CheckpointError, match="--use-distributed-optimizer"):
            check(policy, [REPLICATED, SHARED], "a", "b")
