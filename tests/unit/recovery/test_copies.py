"""Copies of some operators: what stays of use, what is missing, and what need not come back."""

from moc.recovery.copy_placement import to_restore
from moc.recovery.expert_versions import newest_copied_iterations, partly_copied, to_copy
from moc.recovery.inventory import NodeInventory, Summary
from moc.state.operators import Operator

NAMES = [f"layers.0.expert.{e}" for e in range(4)]
OPERATORS = [
    *(Operator(name, "expert", 0, e, 8) for e, name in enumerate(NAMES)),
    Operator("output", "output", None, None, 8),
]


def part(iteration: int, *experts: int, dense: bool = True, copied: tuple[int, ...] | None = None, elements: int = 8):
    names = [*(["output"] if dense else []), *(NAMES[e] for e in experts)]
    whole = {name: ("full", {"master": elements}) for name in names}
    of_these = None if copied is None else ("output", *(NAMES[e] for e in copied))
    return Summary(iteration, 2, 0, whole, copied=of_these)


OWN = [part(7, 3, dense=False), part(9, 2, dense=False, copied=(2,)), part(10, 0, 1, copied=(0,))]


def missing(copies: list[Summary], loaded: dict[int, int]) -> dict[int, set[str]]:
    found = to_copy(OWN, copies, NAMES, [10], {NAMES[e]: {i} for e, i in loaded.items()})
    assert all(detail == "full" for details in found.values() for detail in details.values())
    return {
        iteration: {name.removeprefix("layers.0.expert.") for name in details} for iteration, details in found.items()
    }


def test_holder_that_kept_its_copies_lacks_nothing():
    copies = [part(6, 1, 3, dense=False), part(9, 2, dense=False), part(10, 0)]
    loaded = {0: 10, 1: 10, 2: 9, 3: 7}
    assert missing(copies, loaded) == {
        7: {"3"},
        10: {"output"},
    }  # 7 was copied in full; what is here does not come again
    assert missing([part(7, 3, dense=False), *copies], loaded) == {10: {"output"}}


def test_only_interrupted_copies_are_completed():
    copies = [part(7, 1, 3, dense=False), part(9, 2)]
    assert missing(copies, {0: 10, 1: 10, 2: 9, 3: 7}) == {10: {"output", "0"}}


def test_holder_without_memory_receives_resume_state():
    assert missing([], {0: 10, 1: 10, 2: 9, 3: 7}) == {7: {"3"}, 9: {"2"}, 10: {"output", "0", "1"}}
    assert missing([], {0: 10, 2: 9, 3: 7}) == {7: {"3"}, 9: {"2"}, 10: {"output", "0"}}  # the other one is in storage


def test_newest_copies_of_each_node_are_kept():
    copies = {"a": [part(6, 1), part(8, 2, 3), part(9, 3), part(11, 2)], "b": [part(5, 0), part(8, 0)]}
    nodes = {
        "a": NodeInventory([], {}),
        "b": NodeInventory([part(7, 0, copied=())], {}),
        "c": NodeInventory([], copies),
    }
    assert newest_copied_iterations(nodes, NAMES, 10) == {6, 8, 9} and newest_copied_iterations(nodes, NAMES, 7) == {
        5,
        6,
    }
    assert partly_copied(nodes) and not partly_copied({"c": nodes["c"]})


def test_older_experts_restore_only_where_missing_or_shared():
    def back(own: list[Summary], elements: int) -> list[int]:
        copies = {"a": [part(8, 1, dense=False, elements=elements)]}
        nodes = {"a": NodeInventory(own, {}), "b": NodeInventory([], copies)}
        return [restore.iteration for restore in to_restore(nodes, OPERATORS, exact=False)]

    assert back([], 8) == [8] and back([part(10, 0)], 8) == [8] and back([part(10, 1)], 8) == []
    assert back([part(10, 1)], 4) == [8]  # other nodes may have the other half of that state alone
