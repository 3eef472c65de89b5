"""What snapshots in the memory of nodes cannot have: slices that tensor-parallel ranks on several nodes share."""

from moc.session.tiers import Tiers, check_nodes
from tests.errors import raises


def test_tensor_parallel_ranks_on_several_nodes_are_refused():
    def check(*nodes):
        node = tuple(rank for rank, name in enumerate(nodes) if name == nodes[0])
        check_nodes([0, 1], Tiers(None, None, nodes, True, node, None, 2), "memory")

    check("a", "a")
    with raises("tensor-parallel-across-nodes", "--ckpt-tier memory", "--ckpt-tier disk"):
        check("a", "b")
