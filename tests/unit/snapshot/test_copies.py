"""Copies are joined where memory allows, and nowhere else; and every byte arrives."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from moc.snapshot.device_copy import Copy, coalesced, cut_copies


@st.composite
def cut_storages(draw):
    """Pieces of some sources, in any order, copied one after the other with a gap here and there."""
    sizes = draw(st.lists(st.integers(0, 12), min_size=1, max_size=3))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]))
    pieces = []
    for source, size in enumerate(sizes):
        borders = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=5))})
        pieces += [(source, start, stop) for start, stop in zip(borders, borders[1:] or borders, strict=False)]
    pieces = [pieces[i] for i in draw(st.permutations(range(len(pieces))))] if draw(st.booleans()) else pieces
    gaps = draw(st.lists(st.integers(0, 1), min_size=len(pieces), max_size=len(pieces)))
    return sizes, dtype, pieces, gaps


@given(cut_storages())
def test_adjacent_copies_are_joined_and_all_bytes_arrive(case):
    sizes, dtype, pieces, gaps = case
    sources = [torch.randint(1, 100, (size,)).to(dtype) for size in sizes]
    width, position, parts, places = dtype.itemsize, 0, [], []
    for (source, start, stop), gap in zip(pieces, gaps, strict=True):
        position += gap
        parts.append((sources[source][start:stop], (width * position, width * (position + stop - start))))
        if stop > start:
            places.append((source, start, stop, position))
        position += stop - start
    joined = list(coalesced(*zip(*parts, strict=True))) if parts else []

    breaks = [
        one[0] != other[0] or one[2] != other[1] or one[3] + one[2] - one[1] != other[3]
        for one, other in zip(places, places[1:], strict=False)
    ]
    assert len(joined) == (1 + sum(breaks) if places else 0)

    target, expected = torch.zeros(position, dtype=dtype), torch.zeros(position, dtype=dtype)
    for source, start, stop in joined:
        target.view(torch.uint8)[start:stop].view(dtype).copy_(source)
    for source, start, stop, place in places:
        expected[place : place + stop - start] = sources[source][start:stop]
    assert torch.equal(target, expected)


def test_copies_adjacent_in_only_one_memory_are_not_joined():
    source = torch.arange(8.0)
    assert len(list(coalesced([source[:4], source[4:]], [(0, 16), (16, 32)]))) == 1
    assert len(list(coalesced([source[:4], source[4:]], [(0, 16), (20, 36)]))) == 2
    assert len(list(coalesced([source[:4].clone(), source[4:]], [(0, 16), (16, 32)]))) == 2
    assert len(list(coalesced([source[4:], source[:4]], [(0, 16), (16, 32)]))) == 2


def test_copies_of_different_dtypes_are_not_joined():
    source = torch.zeros(16, dtype=torch.uint8)
    parts = [source[:4].view(torch.float32), source[4:8].view(torch.bfloat16)]
    assert len(list(coalesced(parts, [(0, 4), (4, 8)]))) == 2


def test_empty_copies_are_joined_to_no_copy():
    assert list(coalesced([], [])) == []
    assert list(coalesced([torch.empty(0)], [(8, 8)])) == []


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from([torch.float64, torch.bfloat16, torch.uint8])), max_size=6),
    st.integers(8, 100),
)
def test_copy_pieces_are_bounded_ordered_and_complete(sizes, nbytes):
    sources = [torch.arange(1, size + 1).to(dtype) for size, dtype in sizes]
    copies = [Copy(source, torch.zeros_like(source)) for source in sources]
    cut = list(cut_copies(copies, nbytes))
    amounts = [sum(copy.source.nbytes for copy in piece) for piece in cut]
    assert all(0 < amount <= nbytes for amount in amounts)
    assert all(amount > nbytes - 8 for amount in amounts[:-1])  # as full as elements allow
    for piece in cut:
        for copy in piece:
            copy.target.copy_(copy.source)
    assert all(torch.equal(copy.source, copy.target) for copy in copies)
    first = [copy.source.data_ptr() for piece in cut for copy in piece]
    assert all(sum(source.data_ptr() == one for one in first) == 1 for source in sources if source.numel())
