"""Which node gives what an absent one had, and what each fetches."""

from moc.recovery.inventory import Fetch, NodeInventory, Summary, adopting_nodes, to_fetch

SIZES = dict.fromkeys(("attention", "expert.0", "expert.1"), 8)


def part(iteration, operators, alike=None):
    """Of a snapshot of three ranks: elements by operator."""
    described = {name: ("full", {"master": elements}) for name, elements in operators.items()}
    return Summary(iteration, 3, 1, described, "job", "full", None, alike or {})


def test_holder_of_newest_copy_takes_over_absent_node():
    mine, older, newer = [part(9, {"attention": 8})], [part(8, {"expert.0": 8})], [part(9, {"expert.0": 8})]
    nodes = {"0": NodeInventory(mine, {"1": older}), "2": NodeInventory(mine, {"1": newer, "0": mine})}
    assert adopting_nodes(nodes) == {"1": "2"}
    assert adopting_nodes({"0": NodeInventory(mine, {"1": older, "3": []})}) == {"1": "0"}
    assert adopting_nodes(nodes | {"1": NodeInventory([], {})}) == {}  # it is back


def test_node_fetches_only_state_its_ranks_load():
    nodes = {
        "0": NodeInventory([part(9, {"attention": 4})], {}),
        "2": NodeInventory([part(9, {"attention": 4, "expert.1": 8})], {"1": [part(9, {"expert.0": 8}), part(8, {})]}),
    }
    everything = {9: set(SIZES)}
    assert to_fetch("0", everything, nodes, SIZES) == [
        Fetch(9, "1", "2", {"expert.0": "full"}),
        Fetch(9, "2", "2", {"attention": "full", "expert.1": "full"}),
    ]
    assert to_fetch("0", {9: {"expert.0"}}, nodes, SIZES) == [Fetch(9, "1", "2", {"expert.0": "full"})]
    assert to_fetch("2", everything, nodes, SIZES) == [Fetch(9, "0", "0", {"attention": "full"})]  # the rest is here
    assert to_fetch("0", {8: {"expert.0"}}, nodes, SIZES) == []


def test_identical_replicas_are_fetched_once_and_complete():
    alike = {"attention": 2}
    nodes = {
        "0": NodeInventory([part(9, {"expert.0": 8})], {}),
        "1": NodeInventory([part(9, {"attention": 4, "expert.1": 8}, alike)], {}),
        "2": NodeInventory([part(9, {"attention": 8}, alike)], {}),
        "3": NodeInventory([part(9, {"attention": 8}, alike)], {}),
    }
    assert to_fetch("0", {9: set(SIZES)}, nodes, SIZES) == [
        Fetch(9, "1", "1", {"expert.1": "full"}),
        Fetch(9, "2", "2", {"attention": "full"}),
    ]
    assert to_fetch("3", {9: {"attention"}}, nodes, SIZES) == []
