"""Whatever cut tensors were saved in, any other cut reads back."""

import json
import math
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moc.state.region import Region, boxes_of_range
from moc.store.blobs import LocalBlob
from moc.store.regions import (
    Entry,
    FileLayout,
    MissingRegionError,
    RegionReader,
    RegionTensor,
    digest_of,
    read_sources,
    write_regions,
)
from tests.errors import raises


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
    with raises("tensor-missing", "3 of 6", "exp_avg of layer.weight at (1, 0)"):
        reader.read("layer.weight", "exp_avg", Region((1, 0), (2, 3)), into=torch.empty(6))
    with raises("tensor-missing", "exp_avg_sq of layer.weight"):
        reader.read("layer.weight", "exp_avg_sq", Region((0, 0), (1, 3)), into=torch.empty(3))


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_file_is_named(file, keep):
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(MissingRegionError, match=re.escape(str(file))):
        RegionReader([file])


def test_a_file_of_another_kind_is_named(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with raises("checkpoint-damaged", "other.safetensors"):
        RegionReader([tmp_path / "other.safetensors"])


def test_a_file_without_entries(tmp_path):
    write_regions(tmp_path / "empty.safetensors", [])
    with raises("tensor-missing", "master of w"):
        RegionReader([tmp_path / "empty.safetensors"]).global_shape("w", "master")


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8]
DTYPE = st.sampled_from(DTYPES)


def mixed(path):
    """A file with a tensor of each dtype, narrow ones first; what it holds, by name."""
    tensors = [
        RegionTensor(f"größe.{i}", "param", (3, 1 + i), Region((0, 0), (3, 1 + i)), torch.arange(3 * (1 + i)).to(dtype))
        for i, dtype in enumerate(reversed(DTYPES))
    ]
    write_regions(path, tensors)
    return {tensor.name: tensor for tensor in tensors}


def test_the_file_is_one_that_safetensors_reads(tmp_path):
    from safetensors import safe_open

    held = mixed(tmp_path / "file")
    with safe_open(tmp_path / "file", "pt") as file:
        index = json.loads(file.metadata()["regions"])
        assert list(index) == [str(number) for number in range(len(held))] and set(index) == set(file.keys())
        for key, (name, slot, shape, offset, digest) in index.items():
            values = file.get_tensor(key)
            assert (slot, shape, offset) == ("param", list(held[name].global_shape), [0, 0])
            assert values.dtype == held[name].values.dtype
            assert torch.equal(values.view(-1), held[name].values)
            assert digest == digest_of(held[name].values.view(torch.uint8).numpy().data)


@st.composite
def entries(draw):
    shape = draw(st.lists(st.integers(0, 40), max_size=3).map(tuple))
    return Entry(draw(st.text(max_size=90)), "master", shape, Region((0,) * len(shape), shape), draw(DTYPE))


@given(st.lists(entries(), max_size=60))
def test_a_header_is_the_json_of_its_entries(some):
    layout = FileLayout(some)
    digests = [f"{number:032x}" for number in range(len(some))]
    rows = [
        [entry.name, "master", list(entry.global_shape), [0] * len(entry.global_shape), digest]
        for entry, digest in zip(layout.entries, digests, strict=True)
    ]
    spans = ([start - layout.header_bytes, stop - layout.header_bytes] for start, stop in layout.spans)
    described = {
        str(number): {"dtype": entry.stored_as, "shape": list(entry.region.shape), "data_offsets": span}
        for number, (entry, span) in enumerate(zip(layout.entries, spans, strict=True))
    }
    index = json.dumps({str(number): row for number, row in enumerate(rows)})
    text = json.dumps({"__metadata__": {"regions": index}, **described}).encode()
    header = layout.header(digests)
    assert header[8:].rstrip() == text and header[:8] == (layout.header_bytes - 8).to_bytes(8, "little")


@given(st.lists(entries(), max_size=60))
def test_the_layout_is_known_before_the_data(some):
    layout = FileLayout(some)
    assert sorted(map(repr, layout.entries)) == sorted(map(repr, some))
    for digests in (["0" * 32] * len(some), ["f" * 32] * len(some)):
        assert len(layout.header(digests)) == layout.header_bytes
    assert layout.header_bytes % 4096 == 0
    position = layout.header_bytes
    for entry, (start, stop) in zip(layout.entries, layout.spans, strict=True):
        assert start == position and start % entry.dtype.itemsize == 0 and stop - start == entry.nbytes
        position = stop
    assert layout.nbytes == position


def test_every_bit_of_the_data_counts(tmp_path):
    mixed(tmp_path / "file")
    whole = (tmp_path / "file").read_bytes()
    sources = read_sources(LocalBlob(tmp_path / "file"))
    for position in range(sources[0].start, len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        (tmp_path / "file").write_bytes(damaged)
        hit = next(s.entry for s in sources if s.start <= position < s.start + s.entry.nbytes)
        reader = RegionReader([tmp_path / "file"], verify=True)
        for source in sources:
            asked = source.entry.name, source.entry.slot, source.entry.region
            if source.entry == hit:
                with raises("checkpoint-damaged", f"{tmp_path}/file", f"param of {hit.name} "):
                    reader.get(*asked)
            else:
                reader.get(*asked)


def test_a_file_is_opened_when_it_is_needed(file, tmp_path):
    rest = tmp_path / "rank_00001.safetensors"  # not there yet
    reader = RegionReader([file, rest], lazy=True)
    assert reader.get("layer.weight", "exp_avg", Region((0, 0), (2, 3))).sum() == 6
    write_regions(rest, [RegionTensor("layer.weight", "exp_avg", (4, 3), Region((2, 0), (2, 3)), torch.zeros(2, 3))])
    assert reader.get("layer.weight", "exp_avg", Region((1, 0), (2, 3))).sum() == 3
    assert len(list(reader.sources())) == 2
    with raises("checkpoint-damaged", "rank_00002.safetensors"):
        RegionReader([file, tmp_path / "rank_00002.safetensors"])
    lazy = RegionReader([file, tmp_path / "rank_00002.safetensors"], lazy=True)
    with raises("checkpoint-damaged", "rank_00002.safetensors"):
        lazy.get("layer.weight", "exp_avg", Region((1, 0), (2, 3)))


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": [-24, 0]},
        {"data_offsets": [0, 20]},
        {"data_offsets": [24, 48]},
        {"shape": [2, 30]},
        {"dtype": "X9"},
        {"dtype": None},
        {"shape": "ab"},
    ],
    ids=str,
)
def test_a_header_that_lies_is_refused(file, change):
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = json.dumps({**header, "0": {**header["0"], **change}}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with raises("checkpoint-damaged", str(file)):
        RegionReader([file])
