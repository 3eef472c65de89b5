"""Cutting flattened ranges into boxes, which is all the arithmetic that ZeRO's shards need."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from moc.state.operators import Region, regions_of_range

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def ranges(draw):
    shape = draw(shapes)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


def flat_positions(shape, region):
    """Positions in the flattened tensor of the elements of a box, in the order of the box."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    spans = [range(o, o + n) for o, n in zip(region.offset, region.shape, strict=True)]
    return [sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*spans)]


@given(ranges())
def test_boxes_cover_range_exactly_in_order(case):
    shape, start, stop = case
    covered = []
    for position, box in regions_of_range(shape, start, stop):
        elements = flat_positions(shape, box)
        assert elements and elements == list(range(position, position + box.numel))
        covered += elements
    assert covered == list(range(start, stop))


@given(ranges())
def test_range_needs_few_boxes(case):
    shape, start, stop = case
    assert len(list(regions_of_range(shape, start, stop))) <= 2 * len(shape) - 1


def test_scalar_is_one_box():
    assert list(regions_of_range((), 0, 1)) == [(0, Region((), ()))]


@st.composite
def two_boxes(draw):
    rank = draw(st.integers(1, 3))
    numbers = st.lists(st.integers(0, 4), min_size=rank, max_size=rank).map(tuple)
    sizes = st.lists(st.integers(1, 4), min_size=rank, max_size=rank).map(tuple)
    return Region(draw(numbers), draw(sizes)), Region(draw(numbers), draw(sizes))


def elements(region):
    return set(itertools.product(*(range(o, o + n) for o, n in zip(region.offset, region.shape, strict=True))))


@given(two_boxes())
def test_intersection_contains_common_elements(boxes):
    one, other = boxes
    common, shared = one.intersect(other), elements(one) & elements(other)
    assert elements(common) == shared if shared else common is None
    assert common == other.intersect(one)


@given(two_boxes())
def test_shift_is_reversible_and_slices_match_region(boxes):
    one, other = boxes
    assert one.shifted(other.offset).shifted(tuple(-o for o in other.offset)) == one
    assert one.slices(one.offset) == tuple(slice(0, n) for n in one.shape)
    assert one.slices() == tuple(slice(o, o + n) for o, n in zip(one.offset, one.shape, strict=True))


@given(two_boxes())
def test_remainder_without_part_is_covered_once(boxes):
    one, other = boxes
    common = one.intersect(other)
    if common is not None:
        left = [element for box in one.without(common) for element in elements(box)]
        assert sorted(left) == sorted(elements(one) - elements(common))


@given(two_boxes(), st.integers(1, 70))
def test_chunk_is_split_in_element_order(boxes, most):
    cut = list(boxes[0].cut(most))
    assert all(box.numel <= most for box in cut)
    assert [element for box in cut for element in sorted(elements(box))] == sorted(elements(boxes[0]))
