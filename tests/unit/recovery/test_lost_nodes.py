"""What comes back from other nodes: one window, the newest that is whole, what is newer, and never a mixture."""

from hypothesis import given, settings
from hypothesis import strategies as st

from moc.recovery.copy_placement import Restore, to_restore
from moc.recovery.inventory import NodeInventory, Summary
from moc.state.operators import Operator

FILES = {"a": 1, "b": 2, "c": 3}
WRITERS = sum(FILES.values())
OPERATORS = [Operator(f"layers.0.expert.{number}", "expert", 0, number, 4) for number in (0, 1)]
OPERATORS.append(Operator("output", "output", None, None, 4))
NAMES = [operator.name for operator in OPERATORS]
EVERYTHING = dict.fromkeys(NAMES, "full")
FIRST, SECOND = {NAMES[0]: "full", NAMES[1]: "compute", NAMES[2]: "compute"}, dict.fromkeys(NAMES[1:], "full")


def parts(node, iterations, holding=lambda iteration: EVERYTHING):
    return [part(iteration, WRITERS, FILES[node], holding(iteration)) for iteration in iterations]


def part(iteration, writers, files, details):
    return Summary(iteration, writers, files, {name: (detail, {}) for name, detail in details.items()})


def has(node, own, holding=lambda iteration: EVERYTHING, **copies):
    return NodeInventory(
        parts(node, own, holding), {other: parts(other, its, holding) for other, its in copies.items()}
    )


def back(nodes, spoilt=(), exact=True):
    return to_restore(nodes, OPERATORS, exact, spoilt)


def test_nothing_is_restored_if_nothing_is_lost():
    assert back({"a": has("a", [4]), "b": has("b", [4], a=[4]), "c": has("c", [4])}) == []


def test_lost_node_gets_newest_common_iteration():
    nodes = {"a": has("a", []), "b": has("b", [3, 4], a=[3]), "c": has("c", [3, 4], a=[3])}
    assert back(nodes) == [Restore("a", "b", 3)]
    assert back(nodes, {Restore("a", "b", 3)}) == [Restore("a", "c", 3)]
    assert back(nodes, {Restore("a", "b", 3), Restore("a", "c", 3)}) == []


def test_older_snapshot_is_used_if_newest_copies_are_damaged():
    nodes = {"a": has("a", []), "b": has("b", [3, 4], a=[3, 4]), "c": has("c", [3, 4])}
    assert back(nodes, {Restore("a", "b", 4)}) == [Restore("a", "b", 3)]


def test_two_lost_nodes_are_restored_if_copies_exist():
    nodes = {"a": has("a", []), "b": has("b", []), "c": has("c", [5], a=[5], b=[5])}
    assert back(nodes) == [Restore("a", "c", 5), Restore("b", "c", 5)]
    assert back({"a": has("a", []), "b": has("b", [5], c=[5]), "c": has("c", [5], b=[5])}) == []


def test_parts_of_different_jobs_are_not_mixed():
    other = NodeInventory([part(9, 2, 1, EVERYTHING)], {})
    assert back({"a": other, "b": has("b", [9], a=[9]), "c": has("c", [9])}) == [Restore("a", "b", 9)]


def windows_of_two(iteration):
    return FIRST if iteration % 2 == 0 else SECOND


def test_window_and_window_in_progress_are_restored():
    def nodes(*kept):
        others = has("b", [2, 3, 4, 5, 6], windows_of_two, a=kept), has("c", [2, 3, 4, 5, 6], windows_of_two)
        return {"a": has("a", [], windows_of_two), "b": others[0], "c": others[1]}

    def iterations(*kept, spoilt=()):
        restores = back(nodes(*kept), spoilt)
        assert {restore[:2] for restore in restores} <= {("a", "b")}
        return [restore.iteration for restore in restores]

    assert iterations(2, 3, 4, 5, 6) == [4, 5, 6]
    assert iterations(2, 3, 4, 5) == [4, 5]
    assert iterations(2, 3, 4, 6) == [2, 3, 4, 6]
    assert iterations(2, 3, 4, 5, 6, spoilt={Restore("a", "b", 4)}) == [2, 3, 5, 6]
    assert iterations(3, 4, 6) == []


def test_older_partial_snapshots_are_restored_too():
    partial = {"output": "full", NAMES[1]: "full"}
    nodes = {"a": has("a", [])} | {node: has(node, [3, 4], lambda _: partial, a=[3, 4]) for node in "bc"}
    assert back(nodes, exact=False) == [Restore("a", "b", 3), Restore("a", "b", 4)] and back(nodes) == []


def test_partial_copy_with_most_operators_is_restored():
    fewer, more = ({name: "full" for name in names} for names in (["output"], ["output", NAMES[1]]))
    nodes = {"a": has("a", [])} | {
        node: NodeInventory([], {"a": [part(4, WRITERS, 0, d)]}) for node, d in zip("bc", (fewer, more), strict=True)
    }
    assert back(nodes, exact=False) == [Restore("a", "c", 4)]
    assert back(nodes, {Restore("a", "c", 4)}, exact=False) == [Restore("a", "b", 4)]


def test_copy_is_used_with_newer_gradients_not_newer_state():
    whole = {name: ("full", {"master": 4}) for name in NAMES}
    copied = NodeInventory([], {"a": [Summary(4, WRITERS, 1, whole)]})
    for detail, wanted in (("grad", [Restore("a", "b", 4)]), ("full", [])):
        own = NodeInventory([part(5, WRITERS, 1, dict.fromkeys(NAMES, detail))], {})
        assert back({"a": own, "b": copied}, exact=False) == wanted


iterations = st.lists(st.integers(1, 4), max_size=3, unique=True)
inventories = st.fixed_dictionaries(
    {node: st.builds(has, st.just(node), iterations, **{o: iterations for o in FILES if o != node}) for node in FILES}
)


@settings(deadline=None)
@given(inventories, st.sets(st.builds(Restore, *[st.sampled_from("abc")] * 2, st.integers(1, 4)), max_size=4))
def test_newest_possible_snapshot_is_complete_afterwards(nodes, spoilt):
    def could_have(node, iteration):
        copies = (n for n in nodes if parts(node, [iteration])[0] in nodes[n].copies.get(node, ()))
        own = parts(node, [iteration])[0] in nodes[node].own
        return own or any(Restore(node, holder, iteration) not in spoilt for holder in copies)

    restores = back(nodes, spoilt)
    newest = max((i for i in range(1, 5) if all(could_have(node, i) for node in nodes)), default=None)
    assert {restore.iteration for restore in restores} <= {newest}
    for node in nodes:
        mine = [restore for restore in restores if restore.of == node]
        has_it = newest is None or parts(node, [newest])[0] in nodes[node].own
        assert len(mine) == (not has_it) and not spoilt.intersection(mine)
        for restore in mine:
            assert parts(node, [newest])[0] in nodes[restore.held_by].copies[node]


def in_turn(iteration):
    """One operator in full, the others as gradients; all at the first iteration."""
    return (
        EVERYTHING if iteration == 1 else {name: ["grad", "full"][iteration % 3 == i] for i, name in enumerate(NAMES)}
    )


def test_all_snapshots_of_gradient_chains_are_restored():
    kept = [4, 5, 6]
    nodes = {"a": has("a", []), "b": has("b", kept, in_turn, a=kept), "c": has("c", kept, in_turn)}
    assert back(nodes) == [Restore("a", "b", iteration) for iteration in kept]
    assert back(nodes, {Restore("a", "b", 4)}) == []  # one base is lost
    nodes["b"] = has("b", [3, *kept], in_turn, a=[3, *kept])
    nodes["c"] = has("c", [3, *kept], in_turn)
    assert back(nodes, {Restore("a", "b", 6)}) == [Restore("a", "b", iteration) for iteration in (3, 4, 5)]
