"""Any holder gives any other what that one wants: each element once, in bounded pieces, and nobody waits for ever."""

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from moc.session.resume.survivors import Box, transfers
from moc.state.operators import Region, regions_of_range

SHAPE, WIDTH = (6, 5), 4
WHOLE = Region((0, 0), SHAPE)


def box(region, name="embedding", slot="master"):
    return Box(name, slot, region, WIDTH)


def cut_at(*cuts):
    """By rank, the boxes of a tensor that is cut at some elements, as ZeRO does."""
    edges = [0, *sorted(cuts), math.prod(SHAPE)]
    return [
        [box(region) for _, region in regions_of_range(SHAPE, start, stop)]
        for start, stop in zip(edges[:-1], edges[1:], strict=True)
    ]


def cells(region):
    rows, columns = region.slices()
    return {(row, column) for row in range(6)[rows] for column in range(5)[columns]}


def covered(found, target, number):
    """The elements of a needed box, as often as they are given."""
    return sorted(
        cell for one in found if (one.target, one.target_box) == (target, number) for cell in cells(one.region)
    )


@st.composite
def regions(draw):
    rows, columns = draw(st.integers(0, 5)), draw(st.integers(0, 4))
    return Region((rows, columns), (draw(st.integers(1, 6 - rows)), draw(st.integers(1, 5 - columns))))


boxes_by_rank = st.lists(st.lists(regions().map(box), max_size=3), min_size=4, max_size=4)


@given(boxes_by_rank, boxes_by_rank, st.integers(WIDTH, 200))
def test_held_state_is_sent_once_and_missing_state_named(available, needed, most):
    found, missing = transfers(available, needed, most)
    for one in found:
        assert cells(one.region) <= cells(available[one.source][one.source_box].region)
        assert one.region.numel * WIDTH <= most
    there = set().union(*(cells(its.region) for boxes in available for its in boxes))
    lost = Counter()
    for target, boxes in enumerate(needed):
        for number, its in enumerate(boxes):
            assert covered(found, target, number) == sorted(cells(its.region) & there)
            lost.update(cells(its.region) - there)
    assert Counter(cell for its in missing for cell in cells(its.region)) == lost
    assert (found, missing) == transfers(available, needed, most)


@given(boxes_by_rank, boxes_by_rank, st.integers(WIDTH, 200))
def test_workers_taking_turns_all_finish(available, needed, most):
    found, _ = transfers(available, needed, most)
    queues = [[one for one in found if rank in (one.source, one.target)] for rank in range(4)]
    while any(queues):
        ready = [queue[0] for queue in queues if queue and all(queues[r][0] == queue[0] for r in queue[0][:3:2])]
        assert ready
        for one in set(ready):
            for rank in {one.source, one.target}:
                queues[rank].pop(0)


cuts = st.lists(st.integers(0, math.prod(SHAPE)), max_size=4)


@given(cuts, cuts, st.booleans())
def test_layouts_may_cut_tensor_anywhere(old, new, twice):
    available = cut_at(*old) * (2 if twice else 1)  # replicas hold the same
    needed = [[]] * len(available) + cut_at(*new)
    available += [[]] * (len(needed) - len(available))
    found, missing = transfers(available, needed)
    assert not missing
    for target, boxes in enumerate(needed):
        for number, its in enumerate(boxes):
            assert covered(found, target, number) == sorted(cells(its.region))


def test_replicas_share_sending_and_request_only_missing():
    available = [[box(WHOLE)], [box(WHOLE)], [], []]
    found, _ = transfers(available, [[], [box(WHOLE)], [box(WHOLE)], [box(WHOLE)]], most=5 * WIDTH)
    given = Counter()
    for one in found:
        assert one.source == 1 if one.target == 1 else one.source in (0, 1)
        given[one.source] += one.region.numel * (one.source != one.target)
    assert given == {0: 30, 1: 30}
    first = found[:3]  # different workers give and take at the same time
    assert len({rank for one in first for rank in (one.source, one.target)}) > 2


def test_other_tensors_and_slots_are_not_transferred():
    available = [[box(WHOLE, slot="exp_avg"), box(WHOLE, name="output")], []]
    found, missing = transfers(available, [[], [box(WHOLE)]])
    assert not found and missing == [box(WHOLE)]
