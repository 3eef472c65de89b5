"""Which nodes train, and which part of the model each has, whoever was lost and came."""

from hypothesis import given
from hypothesis import strategies as st

from moc.runtime.seating import (
    NodeCandidate,
    RankBlocks,
    assign_nodes,
    model_part_of,
    partial_model_nodes,
    ready_copies,
)

PARTS = st.integers(1, 4)


@st.composite
def candidates(draw, parts):
    places = draw(st.lists(st.integers(0, 30), unique=True, max_size=12))
    stands = st.one_of(st.none(), st.integers(0, parts - 1))
    found = []
    for place in places:
        part = draw(stands)
        found.append(NodeCandidate(place, part, part is not None and draw(st.booleans())))
    return found


@given(st.data(), PARTS)
def test_nodes_keep_their_parts_and_state_if_possible(data, parts):
    there = data.draw(candidates(parts))
    copies = len(there) // parts
    found = assign_nodes(there, parts, copies)
    assert len(found) == len(set(found)) == copies * parts and set(found) <= {one.block for one in there}
    part_of = {place: seat % parts for seat, place in enumerate(found)}
    for part in range(parts):
        mine = [one for one in there if one.model_part == part]
        stayed = [one for one in mine if part_of.get(one.block) == part]
        assert len(stayed) == min(len(mine), copies)
        assert sum(one.has_state for one in stayed) == min(sum(one.has_state for one in mine), copies)
        of_part = [place for place in found if part_of[place] == part]
        assert of_part == sorted(of_part)


@given(st.data(), PARTS)
def test_moves_fill_missing_parts_idle_nodes_first(data, parts):
    there = data.draw(candidates(parts))
    found = assign_nodes(there, parts, len(there) // parts)
    part_of = {place: seat % parts for seat, place in enumerate(found)}
    moved = [
        one for one in there if one.model_part is not None and part_of.get(one.block, one.model_part) != one.model_part
    ]
    left = [one for one in there if one.block not in part_of]
    assert not moved or all(one.model_part is not None for one in left)
    assert not any(one.has_state for one in moved) or all(one.has_state for one in left)


@given(st.data(), PARTS)
def test_complete_assignment_is_stable(data, parts):
    there = data.draw(candidates(parts))
    copies = len(there) // parts
    found = assign_nodes(there, parts, copies)
    again = [NodeCandidate(place, seat % parts, True) for seat, place in enumerate(found)]
    assert assign_nodes(again, parts, copies) == found and ready_copies(again, parts) == copies


@given(st.data(), PARTS)
def test_ready_copies_are_assigned_without_moves(data, parts):
    there = data.draw(candidates(parts))
    stands = {one.block: one.model_part for one in there}
    copies = ready_copies(there, parts)
    assert copies <= len(there) // parts
    assert all(stands[place] == seat % parts for seat, place in enumerate(assign_nodes(there, parts, copies)))


@given(st.lists(st.integers(0, 30), unique=True), PARTS)
def test_initial_assignment_follows_block_order(places, parts):
    copies = len(places) // parts
    found = assign_nodes(map(NodeCandidate, places), parts, copies)
    assert found == tuple(sorted(places)[: copies * parts])


def test_surplus_node_moves_to_part_with_most_losses():
    left = [NodeCandidate(1, 1, True), NodeCandidate(3, 1, True), NodeCandidate(4, 0, True), NodeCandidate(5, 1, True)]
    assert assign_nodes(left, 2, 2) == (4, 1, 5, 3)  # 0 and 2 are lost, of part 0


def helping(there, parts):
    """Places of copies at once, those of helpers, and those of copies once all nodes are built."""
    now, later = assign_nodes(there, parts, ready_copies(there, parts)), assign_nodes(there, parts, len(there) // parts)
    return now, [(one.block, one.model_part) for one in partial_model_nodes(there, parts, now, later)], later


@given(st.data(), PARTS)
def test_holder_of_part_trains_or_is_partial_model_node(data, parts):
    there = data.draw(candidates(parts))
    now, found, later = helping(there, parts)
    stands = {one.block: one.model_part for one in there}
    goes_to = {place: seat % parts for seat, place in enumerate(later)}
    moves = {place for place, part in goes_to.items() if stands[place] not in (None, part)}
    trained = {one.block for one in there if one.has_state}
    assert {place for place, _ in found} == trained - {*now} - moves
    assert all(stands[place] == part for place, part in found)
    assert [part for _, part in found] == sorted(part for _, part in found)


@given(st.data(), PARTS)
def test_parts_differ_by_at_most_one_node_after_moves(data, parts):
    counts = data.draw(st.lists(st.integers(0, 5), min_size=parts, max_size=parts))
    places = iter(range(sum(counts)))
    there = [NodeCandidate(next(places), part, True) for part, count in enumerate(counts) for _ in range(count)]
    now, found, _ = helping(there, parts)
    seated = [*enumerate(now), *((part, place) for place, part in found)]
    left = [sum(seat % parts == part for seat, _ in seated) for part in range(parts)]
    moved, lacking = sum(counts) - sum(left), sum(max(0, sum(counts) // parts - count) for count in counts)
    assert moved == lacking
    assert moved == 0 or max(counts) - min(counts) > 1
    assert moved == (max(counts) - min(counts)) // 2 or parts != 2


def test_partial_model_nodes_are_selected():
    two, three = [NodeCandidate(0, 0, True), NodeCandidate(2, 0, True)], NodeCandidate(3, 1, True)
    assert helping([*two, three], 2) == ((0, 3), [(2, 0)], (0, 3))
    assert helping([*two, three, NodeCandidate(4)], 2) == ((0, 3), [(2, 0)], (0, 3, 2, 4))
    assert helping([*two, three, NodeCandidate(4, 0, True)], 2)[1] == [(2, 0)]  # and 4 moves
    assert helping([*two, three, NodeCandidate(4, 0, True), NodeCandidate(1)], 2)[1] == [
        (2, 0),
        (4, 0),
    ]  # and 1 is built
    assert helping([*two, NodeCandidate(3, 1)], 2)[1] == [(2, 0)]  # though 3 is yet to get the state of its part


def test_ranks_after_full_copies_are_partial_model_nodes():
    assert [model_part_of(seat, 7, 2, (0, 1, 1)) for seat in range(7)] == [0, 1, 0, 1, 0, 1, 1]
    assert [model_part_of(seat, 4, 2, ()) for seat in range(4)] == [0, 1, 0, 1]
    assert model_part_of(3, 0, 2, ()) == 1  # whatever the number of seats, if nobody helps


def filled(count=2):
    places = RankBlocks(count)
    assert [places.add_node(node, None) for node in range(count)] == list(range(count))
    return places


def test_first_spare_replaces_lost_node_and_next_waits():
    places = filled()
    assert places.add_node(5, None) is None and places.add_node(4, None) is None
    assert places.remove_node(0) == (0, 4) and places.node_in(0) == 4
    assert places.remove_node(1) == (1, 5)
    assert places.remove_node(4) == (0, None) and places.missing_nodes() == [4] and not places.is_complete
    assert places.remove_node(4) == (None, None)  # it is known already


def test_returning_node_prefers_its_former_rank_block():
    places = filled(3)
    places.add_node(3, None)
    places.remove_node(1)  # node 3 has place 1
    places.remove_node(2)
    places.remove_node(0)
    assert places.add_node(2, None) == 2 and places.add_node(1, None) == 0
    assert places.is_complete and places.block_of(0) is None


def test_connected_workers_announce_address_to_latecomer():
    places = RankBlocks(2)
    assert places.add_node(2, 1) == 1 and places.add_node(1, None) is None and places.add_node(0, 0) == 0
    assert places.is_complete


def test_spare_leaves_blocks_of_nodes_still_joining():
    places = RankBlocks(2)
    assert places.add_node(2, None) is None and places.missing_nodes() == [0, 1]
    assert places.remove_node(2) == (None, None)
