"""What snapshots in the memory of nodes cannot have: slices that tensor-parallel ranks on several nodes share."""

import pytest

from moc.session.tiers import Tiers, check_nodes
from moc.store.errors import CheckpointError


def test_tensor_parallel_ranks_may_not_be_on_several_nodes():
    def check(*nodes):
        node = tuple(rank for rank, name in enumerate(nodes) if name == nodes[0])
        check_nodes([0, 1], Tiers(None, None, nodes, True, node, None, 2), "memory")

    check("a", "a")
    with pytest.raises(CheckpointError, match="memory cannot save norms and routers, .* inside of a node"):
        check("a", "b")
