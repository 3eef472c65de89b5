"""Who gives whom what of weights that several pipeline stages hold."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moc.session.resume.tied_weights import Box, gifts
from moc.state.region import Region, boxes_of_range

SHAPE = (6, 5)
TENSOR = ("embedding", "master")


def boxes(cuts, gives):
    """By rank, the boxes of a tensor that is cut at some elements, as ZeRO does."""
    edges = [0, *sorted(cuts), math.prod(SHAPE)]
    return [
        [Box(*TENSOR, region, gives) for _, region in boxes_of_range(SHAPE, start, stop)]
        for start, stop in zip(edges[:-1], edges[1:], strict=True)
    ]


def cells(region):
    return {(row, column) for row in range(6)[region.slices()[0]] for column in range(5)[region.slices()[1]]}


cuts = st.lists(st.integers(0, math.prod(SHAPE)), max_size=4)


@given(cuts, cuts, st.booleans())
def test_each_element_is_given_once_wherever_the_stages_cut(first, last, twice):
    givers = boxes(first, True) * (2 if twice else 1)  # replicas hold the same
    told = givers + boxes(last, False) + [[]]  # and a worker that has nothing of it
    given_cells = {}
    for gift in gifts(told):
        assert told[gift.source][gift.given].gives and not told[gift.target][gift.taken].gives
        assert cells(gift.region) <= cells(told[gift.source][gift.given].region)
        taken = given_cells.setdefault((gift.target, gift.taken), [])
        taken.extend(cells(gift.region))
    for rank, wanted in enumerate(told):
        for number, box in enumerate(wanted):
            if not box.gives:
                assert sorted(given_cells[rank, number]) == sorted(cells(box.region))


def test_other_tensors_and_slots_are_not_taken():
    whole = Region((0, 0), SHAPE)
    told = [[Box("embedding", "exp_avg", whole, True)], [Box("embedding", "master", whole, False)]]
    with pytest.raises(ValueError, match="no pipeline stage saves all of master of embedding"):
        list(gifts(told))
