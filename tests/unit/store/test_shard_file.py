"""Whatever cut tensors were saved in, any other cut reads back."""

import json
import math
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moc.state.operators import Fragment, Region, regions_of_range
from moc.store.shard_file import (
    BoxTensor,
    FileLayout,
    MissingTensorError,
    ShardReader,
    TensorBox,
    compute_digest,
    read_ahead,
    read_stored_boxes,
    read_values,
    write_shard_file,
)
from moc.store.storage import LocalBlob
from tests.cases import each_row
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
            boxes += [box.shifted(offset) for _, box in regions_of_range(local, start, stop)]
    return boxes


@st.composite
def saved_and_wanted(draw):
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    return shape, draw(cuts(shape)), draw(cuts(shape)), draw(st.integers(1, 3))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(saved_and_wanted())
def test_any_split_is_readable_as_any_other_split(tmp_path, case):
    shape, saved, wanted, files = case
    whole = torch.randn(shape)
    entries = [BoxTensor("w", "master", shape, box, whole[box.slices()].contiguous()) for box in saved]
    paths = [tmp_path / f"{i}.safetensors" for i in range(files)]
    for i, path in enumerate(paths):
        write_shard_file(path, entries[i::files])
    reader = ShardReader(paths)
    assert reader.global_shape("w", "master") == shape
    for box in wanted:
        into = torch.full((box.numel,), math.nan)
        reader.read_into("w", "master", box, into=into)
        assert torch.equal(into.view(box.shape), whole[box.slices()])


def written_file(tmp_path):
    """The first two rows of a tensor of four."""
    path = tmp_path / "rank_00000.safetensors"
    write_shard_file(path, [BoxTensor("layer.weight", "exp_avg", (4, 3), Region((0, 0), (2, 3)), torch.ones(2, 3))])
    return path


@pytest.fixture
def file(tmp_path):
    return written_file(tmp_path)


def test_missing_tensor_is_named(file):
    reader = ShardReader([file])
    with raises("tensor-missing", "3 of 6", "exp_avg of layer.weight at (1, 0)"):
        reader.read_into("layer.weight", "exp_avg", Region((1, 0), (2, 3)), into=torch.empty(6))
    with raises("tensor-missing", "exp_avg_sq of layer.weight"):
        reader.read_into("layer.weight", "exp_avg_sq", Region((0, 0), (1, 3)), into=torch.empty(3))


@each_row("keep", [0, 7, 100, -1])
def test_truncated_file_is_named(tmp_path, keep):
    file = written_file(tmp_path)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(MissingTensorError, match=re.escape(str(file))):
        ShardReader([file])


def test_file_of_another_format_is_named(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with raises("checkpoint-damaged", "other.safetensors"):
        ShardReader([tmp_path / "other.safetensors"])


def test_file_without_entries_has_no_tensors(tmp_path):
    write_shard_file(tmp_path / "empty.safetensors", [])
    with raises("tensor-missing", "master of w"):
        ShardReader([tmp_path / "empty.safetensors"]).global_shape("w", "master")


DTYPES = [
    *(torch.complex64, torch.float64, torch.int64, torch.uint64, torch.float32, torch.int32, torch.uint32),
    *(torch.bfloat16, torch.float16, torch.int16, torch.uint16),
    *(torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8),
]
DTYPE = st.sampled_from(DTYPES)


def mixed(path):
    """A file with a tensor of each dtype, narrow ones first; what it holds, by name."""
    tensors = [
        BoxTensor(f"größe.{i}", "param", (3, 1 + i), Region((0, 0), (3, 1 + i)), torch.arange(3 * (1 + i)).to(dtype))
        for i, dtype in enumerate(reversed(DTYPES))
    ]
    write_shard_file(path, tensors)
    return {tensor.name: tensor for tensor in tensors}


def test_file_is_readable_by_safetensors(tmp_path):
    from safetensors import safe_open

    held = mixed(tmp_path / "file")
    with safe_open(tmp_path / "file", "pt") as file:
        index = json.loads(file.metadata()["regions"])
        assert list(index) == [str(number) for number in range(len(held))] and set(index) == set(file.keys())
        for key, (name, slot, shape, offset, digest) in index.items():
            values = file.get_tensor(key)
            assert (slot, shape, offset) == ("param", list(held[name].global_shape), [0, 0])
            assert values.dtype == held[name].values.dtype
            assert torch.equal(values.view(-1).view(torch.uint8), held[name].values.view(torch.uint8))
            assert digest == compute_digest(held[name].values.view(torch.uint8).numpy().data)


def test_tensor_of_any_dtype_is_read_back(tmp_path):
    held = mixed(tmp_path / "file")
    reader = ShardReader([tmp_path / "file"], verifies=True)
    for name, tensor in held.items():
        values = reader.read_region(name, "param", tensor.region)
        assert values.dtype == tensor.values.dtype
        assert torch.equal(values.contiguous().view(-1).view(torch.uint8), tensor.values.view(torch.uint8))
    with raises("dtype-unsupported", "master of w"):
        write_shard_file(
            tmp_path / "wide", [BoxTensor("w", "master", (), Region((), ()), torch.zeros((), dtype=torch.complex128))]
        )


@st.composite
def entries(draw):
    shape = draw(st.lists(st.integers(0, 40), max_size=3).map(tuple))
    return TensorBox(draw(st.text(max_size=90)), "master", shape, Region((0,) * len(shape), shape), draw(DTYPE))


@given(st.lists(entries(), max_size=60))
def test_header_is_json_of_its_entries(some):
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
def test_layout_is_known_before_data(some):
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


def test_every_changed_data_bit_is_detected(tmp_path):
    mixed(tmp_path / "file")
    whole = (tmp_path / "file").read_bytes()
    sources = read_stored_boxes(LocalBlob(tmp_path / "file"))
    for position in range(sources[0].start, len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        (tmp_path / "file").write_bytes(damaged)
        hit = next(s.box for s in sources if s.start <= position < s.start + s.box.nbytes)
        reader = ShardReader([tmp_path / "file"], verifies=True)
        for source in sources:
            asked = source.box.name, source.box.slot, source.box.region
            if source.box == hit:
                with raises("checkpoint-damaged", f"{tmp_path}/file", f"param of {hit.name} "):
                    reader.read_region(*asked)
            else:
                reader.read_region(*asked)


def test_file_is_opened_lazily(file, tmp_path):
    rest = tmp_path / "rank_00001.safetensors"  # not there yet
    reader = ShardReader([file, rest], opens_lazily=True)
    assert reader.read_region("layer.weight", "exp_avg", Region((0, 0), (2, 3))).sum() == 6
    write_shard_file(rest, [BoxTensor("layer.weight", "exp_avg", (4, 3), Region((2, 0), (2, 3)), torch.zeros(2, 3))])
    assert reader.read_region("layer.weight", "exp_avg", Region((1, 0), (2, 3))).sum() == 3
    assert len(list(reader.sources())) == 2
    with raises("checkpoint-damaged", "rank_00002.safetensors"):
        ShardReader([file, tmp_path / "rank_00002.safetensors"])
    lazy = ShardReader([file, tmp_path / "rank_00002.safetensors"], opens_lazily=True)
    with raises("checkpoint-damaged", "rank_00002.safetensors"):
        lazy.read_region("layer.weight", "exp_avg", Region((1, 0), (2, 3)))


@each_row(
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
def test_inconsistent_header_is_refused(tmp_path, change):
    file = written_file(tmp_path)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = json.dumps({**header, "0": {**header["0"], **change}}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with raises("checkpoint-damaged", str(file)):
        ShardReader([file])


NAME = "embedding.word_embeddings.weight"


def fragment(shape, region, padded=True, dtype=torch.float32, name=NAME):
    view = torch.empty(region.numel, dtype=dtype)
    return Fragment(name, "master", shape, region, view, True, padded, view, 0, (0,), False)


def saved(path, rows, dtype=torch.float32):
    """A vocabulary of some rows with three columns, of which all values are positive."""
    values = torch.arange(1, 3 * rows + 1).to(dtype).view(rows, 3)
    half = rows // 2
    write_shard_file(
        path,
        [
            BoxTensor(NAME, "master", (rows, 3), Region((first, 0), (last - first, 3)), values[first:last])
            for first, last in ((0, half), (half, rows))
        ],
    )
    return values


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_rows_missing_in_file_are_zeros(tmp_path, there, here, data):
    values = saved(tmp_path / "file", there)
    first = data.draw(st.integers(0, here - 1))
    rows = data.draw(st.integers(1, here - first))
    column = data.draw(st.integers(0, 2))
    region = Region((first, column), (rows, 3 - column))
    padded = torch.zeros(max(here, there), 3)
    padded[:there] = values
    found = read_values(fragment((here, 3), region), ShardReader([tmp_path / "file"], verifies=True))
    assert torch.equal(found, padded[region.slices()])


def test_zero_rows_have_dtype_of_target(tmp_path):
    saved(tmp_path / "file", 2, torch.bfloat16)
    region = Region((2, 0), (2, 3))
    found = read_values(fragment((4, 3), region, dtype=torch.bfloat16), ShardReader([tmp_path / "file"]))
    assert found.dtype == torch.bfloat16 and not found.any()


def test_other_shape_is_refused_for_unpadded_tensor(tmp_path):
    saved(tmp_path / "file", 4)
    with raises("checkpoint-of-another-model", "(4, 3)", "(6, 3)"):
        read_values(fragment((6, 3), Region((0, 0), (6, 3)), padded=False), ShardReader([tmp_path / "file"]))


@each_row(("index", "expected"), [(2, [2, 2, 2]), (7, [1, 1, 1]), (10, [1, 1, 1])])
def test_missing_worker_takes_module_state_of_lowest_index(index, expected, tmp_path):
    tensors = [
        BoxTensor(f"module_state.output.{i}", "param", (3,), Region((0,), (3,)), torch.full((3,), i).byte())
        for i in (10, 1, 2)
        if i != index or index == 2
    ]
    foreign = torch.zeros(3).byte()  # names that no program gives
    tensors += [BoxTensor(f"module_state.output.{i}", "param", (3,), Region((0,), (3,)), foreign) for i in ("", "x.0")]
    write_shard_file(tmp_path / "file", tensors)
    reader = ShardReader([tmp_path / "file"])

    def read(operator: str, size: int) -> list[int]:
        view, region = torch.empty(size, dtype=torch.uint8), Region((0,), (size,))
        name = f"module_state.{operator}.{index}"
        return read_values(
            Fragment(name, "param", (size,), region, view, True, True, view, 0, (0,), True), reader
        ).tolist()

    assert read("output", 3) == expected
    assert read("output", 5) == [*expected, 0, 0]
    assert read("embedding", 2) == [0, 0]


def test_vocabulary_with_other_number_of_axes_is_refused(tmp_path):
    write_shard_file(tmp_path / "file", [BoxTensor(NAME, "master", (6,), Region((0,), (6,)), torch.ones(6))])
    with raises("checkpoint-of-another-model", "(6,)"):
        read_values(fragment((2, 3), Region((0, 0), (2, 3))), ShardReader([tmp_path / "file"]))


def test_contradictory_files_are_refused(tmp_path):
    saved(tmp_path / "one", 4)
    write_shard_file(tmp_path / "two", [BoxTensor(NAME, "master", (12,), Region((6,), (6,)), torch.ones(6))])
    with raises("checkpoint-damaged", "two"):
        ShardReader([tmp_path / "one", tmp_path / "two"])


def test_missing_values_are_named(tmp_path):
    saved(tmp_path / "file", 4)
    with raises("tensor-missing", "master of other"):
        read_values(fragment((4, 3), Region((0, 0), (4, 3)), name="other"), ShardReader([tmp_path / "file"]))


def test_damaged_values_are_not_loaded(tmp_path):
    saved(tmp_path / "file", 4)
    data = bytearray((tmp_path / "file").read_bytes())
    data[-1] ^= 1
    (tmp_path / "file").write_bytes(data)
    reader = ShardReader([tmp_path / "file"], verifies=True)
    with raises("checkpoint-damaged", f"{tmp_path}/file", f"master of {NAME}"):
        read_values(fragment((6, 3), Region((0, 0), (6, 3))), reader)
    read_values(fragment((6, 3), Region((0, 0), (2, 3))), reader)  # the other entry is whole


@each_row("lead", [0, 12, 1 << 20])
def test_reading_ahead_omits_nothing(tmp_path, lead):
    values = saved(tmp_path / "file", 6)
    fragments = [fragment((8, 3), Region((row, 0), (1, 3))) for row in range(8)]
    reader = ShardReader([tmp_path / "file"], verifies=True, opens_lazily=True)
    given_back = list(read_ahead(fragments, reader, lead))
    assert given_back == fragments
    for row, one in enumerate(given_back[:6]):
        assert torch.equal(read_values(one, reader), values[row : row + 1])


class Recorded(list):
    """A sequence that tells which of its items were asked for by number."""

    def __init__(self, items):
        super().__init__(items)
        self.asked = []

    def __getitem__(self, number):
        self.asked.append(number)
        return super().__getitem__(number)


@each_row(
    ("lead", "beforehand"), [(0, [1, 2, 3, 4, 5]), (12, [1, 2, 3, 4, 5]), (13, [2, 3, 4, 5, 5]), (36, [3, 4, 5, 5, 5])]
)
def test_reading_ahead_respects_its_limit(tmp_path, lead, beforehand):
    """Fragments of 12 bytes: those that begin within the lead are read in advance, and the next one in any case."""
    saved(tmp_path / "file", 5)
    fragments = Recorded(fragment((5, 3), Region((row, 0), (1, 3))) for row in range(5))
    seen, read = [], []

    class Reader(ShardReader):
        def will_read(self, name, slot, region):
            read.append(region.offset[0])

    for _ in read_ahead(fragments, Reader([tmp_path / "file"]), lead):
        seen.append(len(fragments.asked))
    assert seen == beforehand and read == fragments.asked == [0, 1, 2, 3, 4]
