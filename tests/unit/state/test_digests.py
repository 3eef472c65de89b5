"""Digests of the state do not depend on how tensors are partitioned, and depend on every bit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.state import digests
from moc.state.digests import (
    ChunkDigest,
    StateDigest,
    blocks_of,
    chunk_sums,
    differing_operators,
    from_limbs,
    to_limbs,
    to_text,
    total_of,
)
from moc.state.operators import Fragment, Region, regions_of_range
from tests.cases import each_row
from tests.fake_cuda import GPU, FakeCuda

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)
MASK = (1 << 64) - 1
Shapes = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


NAME = "decoder.final_layernorm.weight"


def chunk(tensor: torch.Tensor, region: Region, name: str = NAME, shift: int = 0) -> Fragment:
    """A chunk of a tensor, whose memory begins after ``shift`` other elements."""
    values = torch.empty(region.numel + shift, dtype=tensor.dtype)[shift:]
    values.copy_(tensor[region.slices()].reshape(-1))
    return of(values, region, tuple(tensor.shape), name)


def of(values: torch.Tensor, region: Region, shape: tuple[int, ...], name: str = NAME) -> Fragment:
    """A chunk of a tensor of a shape, with these values."""
    return Fragment(
        name=name, slot="master", global_shape=shape, region=region, view=values, first_copy=True,
        padded=False, tensor=values, start=0, replica=(0, 0, 0), sharded=False,
    )  # fmt: skip


def digest(tensor: torch.Tensor, regions: list[Region], **more) -> int:
    """The sum over chunks."""
    return sum(int(ChunkDigest.of(chunk(tensor, region, **more))()) for region in regions) & MASK


def whole(tensor: torch.Tensor) -> list[Region]:
    """One chunk."""
    return [Region((0,) * tensor.dim(), tuple(tensor.shape))]


def some(shape, dtype) -> torch.Tensor:
    """A tensor with any bits."""
    count = math.prod(shape) * torch.empty((), dtype=dtype).itemsize
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


@settings(deadline=None, max_examples=150)
@given(Shapes, st.sampled_from(DTYPES), st.data())
def test_chunk_digests_add_up_to_tensor_digest(shape, dtype, data):
    tensor = some(shape, dtype)
    regions, shift = whole(tensor), data.draw(st.integers(0, 3))
    for _ in range(data.draw(st.integers(0, 4))):  # tensor, expert and pipeline parallelism
        region = regions.pop(data.draw(st.integers(0, len(regions) - 1)))
        axis = data.draw(st.integers(0, len(shape) - 1))
        middle = data.draw(st.integers(0, region.shape[axis]))
        for start, stop in ((0, middle), (middle, region.shape[axis])):
            offset, size = list(region.offset), list(region.shape)
            offset[axis], size[axis] = offset[axis] + start, stop - start
            regions += [Region(tuple(offset), tuple(size))] if math.prod(size) else []
    assert digest(tensor, regions, shift=shift) == digest(tensor, whole(tensor))


@settings(deadline=None, max_examples=100)
@given(Shapes, st.sampled_from(DTYPES), st.data())
def test_range_digests_add_up_to_tensor_digest(shape, dtype, data):
    tensor = some(shape, dtype)
    cuts = sorted(data.draw(st.lists(st.integers(0, tensor.numel()), max_size=4)))  # ZeRO
    ranges = zip([0, *cuts], [*cuts, tensor.numel()], strict=True)
    regions = [box for start, stop in ranges for _, box in regions_of_range(shape, start, stop)]
    assert digest(tensor, regions) == digest(tensor, whole(tensor))


@settings(deadline=None, max_examples=150)
@given(Shapes, st.sampled_from(DTYPES), st.data())
def test_each_changed_bit_changes_digest(shape, dtype, data):
    tensor = some(shape, dtype)
    before, bits = digest(tensor, whole(tensor)), tensor.view(-1).view(torch.uint8)
    bits[data.draw(st.integers(0, len(bits) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(tensor, whole(tensor)) != before


def test_exchanged_elements_rows_and_tensors_change_digest():
    tensor = torch.arange(24.0).view(4, 6)
    before = digest(tensor, whole(tensor))
    for other in (tensor.flip(0), tensor.flip(1), tensor.roll(1)):
        assert digest(other, whole(other)) != before
    assert digest(tensor, whole(tensor), name="decoder.final_layernorm.bias") != before


def test_large_tensors_are_hashed_in_parts():
    tensor = some((300, 1000), torch.float32)
    halves = [Region((0, 0), (300, 402)), Region((0, 402), (300, 598))]
    rows = [Region((0, 0), (133, 1000)), Region((133, 0), (167, 1000))]
    assert digest(tensor, whole(tensor)) == digest(tensor, halves) == digest(tensor, rows)


@given(st.lists(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=3, max_size=3), min_size=1, max_size=5))
def test_sums_of_all_ranks_are_exact(ranks):
    limbs = sum(to_limbs(torch.tensor(sums)) for sums in ranks)
    expected = [sum(column) & MASK for column in zip(*ranks, strict=True)]
    assert from_limbs(limbs.tolist()) == expected
    keys = [("embedding", "master"), ("output", "master"), ("output", "exp_avg")]
    known = {key: value for key, value in zip(keys, expected, strict=True) if value}
    parts = [to_text(keys, sums) for sums in ranks]
    assert {key: value for key, value in total_of(parts).items() if value} == known


@each_row("unknown, expected", (((), ["embedding", "output"]), (("output",), ["embedding"])))
def test_differing_operators_are_found(unknown, expected):
    now = {("embedding", "master"): 1, ("layers.0.router", "master"): 3}
    before = {("output", "master"): 1, ("layers.0.router", "master"): 3, ("layers.0.router", "param"): 0}
    assert differing_operators(now, before, unknown) == expected


@pytest.fixture
def gpu():
    """A GPU whose tensors the module does not keep."""
    digests._odd_numbers.cache_clear()
    yield FakeCuda()
    digests._odd_numbers.cache_clear()


def test_digest_on_device_is_launched_without_waits(gpu):
    """Also of slices of a tensor, and of state that is partly in host memory."""
    with gpu:
        large = torch.empty(1 << 30, device=GPU)  # 4 GB
        sliced = torch.empty(8 * 64, device=GPU)
        unaligned = torch.empty(8 * 3, dtype=torch.bfloat16, device=GPU)
        buffer, offloaded = torch.empty(6, device=GPU), torch.empty(1000)
    parts = [
        of(large, Region((0,), (1 << 30,)), (1 << 30,)),
        of(sliced, Region((0, 64), (8, 64)), (8, 128)),
        of(offloaded, Region((0,), (1000,)), (1000,)),
        of(unaligned, Region((0, 3), (8, 3)), (8, 6)),
        of(buffer, Region((0,), (6,)), (6,)),
    ]
    digest = StateDigest(parts, [("output", "master")])
    with gpu:
        assert digest.compute().device.type == GPU
        with gpu.measured():
            digest.compute()
        assert not gpu.waits and gpu.launches < 10_000


def test_many_chunks_on_device_take_few_launches(gpu):
    with gpu:
        parts = [of(torch.empty(1000, device=GPU), Region((0,), (1000,)), (1000,)) for _ in range(500)]
    digest = StateDigest(parts, [("output", "master")])
    with gpu:
        digest.compute()
        with gpu.measured():
            digest.compute()
        assert not gpu.waits and gpu.launches < 100


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 12), st.integers(0, 5))
def test_blocks_have_digests_of_their_chunks(lengths, most, first):
    """As on a device, which other tests compute on the CPU."""
    chunks = []
    for number, words in enumerate(lengths):
        tensor = some((2 * (words + first),), torch.float32)
        chunks.append(ChunkDigest.of(chunk(tensor, Region((2 * first,), (2 * words,)), f"{NAME}{number}")))
        assert chunks[-1].is_run
    sums = torch.zeros(len(chunks), dtype=torch.int64)
    for block in blocks_of(chunks, range(len(chunks)), most):
        block.add_to(sums)
    assert sums.tolist() == [int(each()) for each in chunks]


def test_sums_of_chunks_are_in_order_of_chunks():
    tensors = [some((size,), torch.float32) for size in (8, 3, 5)]
    parts = [chunk(tensor, *whole(tensor)) for tensor in tensors]
    found = chunk_sums(parts)
    assert [value for _, value in found] == [digest(tensor, whole(tensor)) for tensor in tensors]
    assert all(part is own for (part, _), own in zip(found, parts, strict=True))
