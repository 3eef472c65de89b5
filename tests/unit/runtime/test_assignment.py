"""Places and the nodes that fill them."""

from moc.runtime.seating import NodeAssignment


def filled(count=2):
    places = NodeAssignment(count)
    assert [places.comes(node, None) for node in range(count)] == list(range(count))
    return places


def test_the_first_spare_takes_the_place_and_the_next_waits():
    places = filled()
    assert places.comes(5, None) is None and places.comes(4, None) is None
    assert places.goes(0) == (0, 4) and places.filler(0) == 4
    assert places.goes(1) == (1, 5)
    assert places.goes(4) == (0, None) and places.missing() == [4] and not places.complete
    assert places.goes(4) == (None, None)  # it is known already


def test_a_node_that_comes_back_prefers_the_place_that_it_had_then_that_of_its_number():
    places = filled(3)
    places.comes(3, None)
    places.goes(1)  # node 3 has place 1
    places.goes(2)
    places.goes(0)
    assert places.comes(2, None) == 2 and places.comes(1, None) == 0
    assert places.complete and places.of(0) is None


def test_workers_that_are_there_tell_the_place_to_one_who_has_not_seen_them_come():
    places = NodeAssignment(2)
    assert places.comes(2, 1) == 1 and places.comes(1, None) is None and places.comes(0, 0) == 0
    assert places.complete


def test_a_spare_leaves_the_places_of_those_that_are_yet_to_come():
    places = NodeAssignment(2)
    assert places.comes(2, None) is None and places.missing() == [0, 1]
    assert places.goes(2) == (None, None)
