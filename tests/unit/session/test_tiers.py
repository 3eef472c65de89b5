"""What snapshots in the memory of nodes cannot have: what several nodes hold alike."""

import pytest

from moc.session.tiers import Tiers, check_nodes
from moc.sharding.item import Item
from moc.store.errors import CheckpointError

OWN = [Item("output", "optimizer", None, 0, 60, (rank,)) for rank in (0, 1)]
REPLICATED = [Item("output", "optimizer", None, 0, 120, (0, 1))]


def check(items, slices, *nodes):
    node = tuple(rank for rank, name in enumerate(nodes) if name == nodes[0])
    check_nodes(items, slices, Tiers(None, None, nodes, True, node, None, 2), "memory")


def test_slices_of_an_optimizer_may_be_on_several_nodes():
    check(OWN, [0], "a", "b")


def test_replicas_of_an_optimizer_may_not():
    check(REPLICATED, [0], "a", "a")
    with pytest.raises(CheckpointError, match="memory cannot save output, .* --use-distributed-optimizer"):
        check(REPLICATED, [0], "a", "b")


def test_neither_may_tensor_parallel_ranks():
    check(OWN, [0, 1], "a", "a")
    with pytest.raises(CheckpointError, match="memory cannot save norms and routers, .* inside of a node"):
        check(OWN, [0, 1], "a", "b")
