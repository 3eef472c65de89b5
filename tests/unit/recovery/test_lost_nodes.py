"""What comes back from other nodes: one snapshot, the newest that is whole, and never a mixture."""

from hypothesis import given, settings
from hypothesis import strategies as st

from moc.recovery.lost_nodes import Inventory, Part, Restore, to_restore

FILES = {"a": 1, "b": 2, "c": 3}
WRITERS = sum(FILES.values())


def parts(node, iterations):
    return tuple(Part(iteration, WRITERS, FILES[node]) for iteration in iterations)


def has(node, own, **copies):
    return Inventory(parts(node, own), {other: parts(other, iterations) for other, iterations in copies.items()})


def test_nothing_comes_back_where_nothing_is_lost():
    assert to_restore({"a": has("a", [4]), "b": has("b", [4], a=[4]), "c": has("c", [4])}) == []


def test_a_lost_node_gets_the_newest_that_all_can_have():
    nodes = {"a": has("a", []), "b": has("b", [3, 4], a=[3]), "c": has("c", [3, 4], a=[3])}
    assert to_restore(nodes) == [Restore("a", "b", 3)]
    assert to_restore(nodes, {Restore("a", "b", 3)}) == [Restore("a", "c", 3)]
    assert to_restore(nodes, {Restore("a", "b", 3), Restore("a", "c", 3)}) == []


def test_an_older_one_is_taken_where_all_copies_of_the_newest_are_damaged():
    nodes = {"a": has("a", []), "b": has("b", [3, 4], a=[3, 4]), "c": has("c", [3, 4])}
    assert to_restore(nodes, {Restore("a", "b", 4)}) == [Restore("a", "b", 3)]


def test_two_lost_nodes():
    nodes = {"a": has("a", []), "b": has("b", []), "c": has("c", [5], a=[5], b=[5])}
    assert to_restore(nodes) == [Restore("a", "c", 5), Restore("b", "c", 5)]
    assert to_restore({"a": has("a", []), "b": has("b", [5], c=[5]), "c": has("c", [5], b=[5])}) == []


def test_parts_of_different_jobs_are_not_mixed():
    other = Inventory((Part(9, 2, 1),), {})
    assert to_restore({"a": other, "b": has("b", [9], a=[9]), "c": has("c", [9])}) == [Restore("a", "b", 9)]


iterations = st.lists(st.integers(1, 4), max_size=3, unique=True)
inventories = st.fixed_dictionaries(
    {node: st.builds(has, st.just(node), iterations, **{o: iterations for o in FILES if o != node}) for node in FILES}
)


@settings(deadline=None)
@given(inventories, st.sets(st.builds(Restore, *[st.sampled_from("abc")] * 2, st.integers(1, 4)), max_size=4))
def test_after_it_one_snapshot_is_whole_and_none_that_is_newer_could_be(nodes, spoilt):
    def could_have(node, iteration):
        copies = (n for n in nodes if parts(node, [iteration])[0] in nodes[n].copies.get(node, ()))
        own = parts(node, [iteration])[0] in nodes[node].own
        return own or any(Restore(node, holder, iteration) not in spoilt for holder in copies)

    restores = to_restore(nodes, spoilt)
    newest = max((i for i in range(1, 5) if all(could_have(node, i) for node in nodes)), default=None)
    assert {restore.iteration for restore in restores} <= {newest}
    for node in nodes:
        mine = [restore for restore in restores if restore.of == node]
        has_it = newest is None or parts(node, [newest])[0] in nodes[node].own
        assert len(mine) == (not has_it) and not spoilt.intersection(mine)
        for restore in mine:
            assert parts(node, [newest])[0] in nodes[restore.held_by].copies[node]
