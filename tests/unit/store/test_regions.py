"""Whatever cut tensors were saved in, any other cut reads back."""

import math
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moc.state.region import Region, boxes_of_range
from moc.store.regions import MissingRegionError, RegionReader, RegionTensor, write_regions


@st.composite
def cuts(draw, shape):
    """Cuts a tensor into boxes: a tensor-parallel slice first, then ZeRO ranges of each half."""
    axis = draw(st.integers(0, len(shape) - 1))
    middle = draw(st.integers(1, shape[axis])) if shape[axis] > 1 else shape[axis]
    boxes = []
    for first, last in ((0, middle), (middle, shape[axis])):
        if first == last:
            continue
        offset = tuple(first if a == axis else 0 for a in range(len(shape)))
        local = tuple(last - first if a == axis else n for a, n in enumerate(shape))
        border = draw(st.integers(0, math.prod(local)))
        for start, stop in ((0, border), (border, math.prod(local))):
            boxes += [box.shifted(offset) for _, box in boxes_of_range(local, start, stop)]
    return boxes


@st.composite
def saved_and_wanted(draw):
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    return shape, draw(cuts(shape)), draw(cuts(shape)), draw(st.integers(1, 3))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(saved_and_wanted())
def test_any_split_reads_back_under_any_other(tmp_path, case):
    shape, saved, wanted, files = case
    whole = torch.randn(shape)
    entries = [RegionTensor("w", "master", shape, box, whole[box.slices()].contiguous()) for box in saved]
    paths = [tmp_path / f"{i}.safetensors" for i in range(files)]
    for i, path in enumerate(paths):
        write_regions(path, entries[i::files])
    reader = RegionReader(paths)
    assert reader.global_shape("w", "master") == shape
    for box in wanted:
        into = torch.full((box.numel,), math.nan)
        reader.read("w", "master", box, into=into)
        assert torch.equal(into.view(box.shape), whole[box.slices()])


@pytest.fixture
def file(tmp_path):
    """The first two rows of a tensor of four."""
    path = tmp_path / "rank_00000.safetensors"
    write_regions(path, [RegionTensor("layer.weight", "exp_avg", (4, 3), Region((0, 0), (2, 3)), torch.ones(2, 3))])
    return path


def test_what_is_missing_is_named(file):
    reader = RegionReader([file])
    with pytest.raises(MissingRegionError, match=r"3 of 6 elements of exp_avg of layer\.weight at \(1, 0\)"):
        reader.read("layer.weight", "exp_avg", Region((1, 0), (2, 3)), into=torch.empty(6))
    with pytest.raises(MissingRegionError, match="exp_avg_sq of layer.weight"):
        reader.read("layer.weight", "exp_avg_sq", Region((0, 0), (1, 3)), into=torch.empty(3))


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_file_is_named(file, keep):
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(MissingRegionError, match=re.escape(str(file))):
        RegionReader([file])


def test_a_file_of_another_kind_is_named(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(MissingRegionError, match="other.safetensors is not a file of regions"):
        RegionReader([tmp_path / "other.safetensors"])


def test_a_file_without_entries(tmp_path):
    write_regions(tmp_path / "empty.safetensors", [])
    with pytest.raises(MissingRegionError, match="no file holds"):
        RegionReader([tmp_path / "empty.safetensors"]).global_shape("w", "master")
