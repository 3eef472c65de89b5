"""What the memory of several nodes holds together."""

from moc.recovery.inventory import Summary, in_memory
from moc.recovery.sources import MEMORY, AvailableCheckpoint
from moc.state.operators import Operator

OPERATORS = [Operator("output", "output", None, None, 10), Operator("layers.0.router", "router", 0, None, 6)]


def node(files, **operators):
    return [Summary(3, 3, files, operators)]


def full(elements):
    return "full", {"master": elements, "exp_avg": elements}


def test_all_parts_are_a_whole():
    nodes = [node(1, output=("compute", {"param": 4})), node(2, output=("compute", {"param": 6}))]
    assert in_memory(nodes, OPERATORS) == [AvailableCheckpoint(3, MEMORY, {"output": "compute"})]
    assert in_memory(nodes[:1], OPERATORS) == [AvailableCheckpoint(3, MEMORY, {})]


def test_what_a_lost_node_had_nothing_of_is_whole_at_each_detail():
    (one,) = in_memory([node(1, output=("compute", {"param": 10}), **{"layers.0.router": full(6)})], OPERATORS)
    assert one.operators == {"output": "compute", "layers.0.router": "full"}
    (one,) = in_memory([node(1, output=full(9), **{"layers.0.router": ("compute", {"param": 5})})], OPERATORS)
    assert one.operators == {}


def test_biases_of_routers_are_not_among_their_parameters():
    (one,) = in_memory([node(1, **{"layers.0.router": ("compute", {"param": 6 + 4})})], OPERATORS)
    assert one.operators == {"layers.0.router": "compute"}
    (one,) = in_memory([node(1, **{"layers.0.router": ("full", {"param": 6})})], OPERATORS)
    assert one.operators == {}
