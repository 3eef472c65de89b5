"""What live memory takes from a checkpoint, padding of vocabularies included."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moc.state.fragments import Fragment
from moc.state.region import Region
from moc.store.fill import reading_ahead, values_for
from moc.store.regions import RegionReader, RegionTensor, write_regions
from tests.errors import raises

NAME = "embedding.word_embeddings.weight"


def fragment(shape, region, padded=True, dtype=torch.float32, name=NAME):
    view = torch.empty(region.numel, dtype=dtype)
    return Fragment(name, "master", shape, region, view, True, padded, view, 0, (0,), False)


def saved(path, rows, dtype=torch.float32):
    """A vocabulary of some rows with three columns, of which all values are positive."""
    values = torch.arange(1, 3 * rows + 1).to(dtype).view(rows, 3)
    half = rows // 2
    write_regions(
        path,
        [
            RegionTensor(NAME, "master", (rows, 3), Region((first, 0), (last - first, 3)), values[first:last])
            for first, last in ((0, half), (half, rows))
        ],
    )
    return values


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_rows_that_only_this_layout_has_are_zeros(tmp_path, there, here, data):
    values = saved(tmp_path / "file", there)
    first = data.draw(st.integers(0, here - 1))
    rows = data.draw(st.integers(1, here - first))
    column = data.draw(st.integers(0, 2))
    region = Region((first, column), (rows, 3 - column))
    padded = torch.zeros(max(here, there), 3)
    padded[:there] = values
    found = values_for(fragment((here, 3), region), RegionReader([tmp_path / "file"], verify=True))
    assert torch.equal(found, padded[region.slices()])


def test_zeros_have_the_dtype_of_what_is_filled(tmp_path):
    saved(tmp_path / "file", 2, torch.bfloat16)
    region = Region((2, 0), (2, 3))
    found = values_for(fragment((4, 3), region, dtype=torch.bfloat16), RegionReader([tmp_path / "file"]))
    assert found.dtype == torch.bfloat16 and not found.any()


def test_another_shape_is_refused_where_nothing_is_padded(tmp_path):
    saved(tmp_path / "file", 4)
    with raises("checkpoint-of-another-model", "(4, 3)", "(6, 3)"):
        values_for(fragment((6, 3), Region((0, 0), (6, 3)), padded=False), RegionReader([tmp_path / "file"]))


@pytest.mark.parametrize(("index", "expected"), [(2, [2, 2, 2]), (7, [1, 1, 1]), (10, [1, 1, 1])])
def test_module_state_of_a_missing_worker_is_that_of_the_lowest_index(index, expected, tmp_path):
    tensors = [
        RegionTensor(f"module_state.output.{i}", "param", (3,), Region((0,), (3,)), torch.full((3,), i).byte())
        for i in (10, 1, 2)
        if i != index or index == 2
    ]
    foreign = torch.zeros(3).byte()  # names that no program gives
    tensors += [
        RegionTensor(f"module_state.output.{i}", "param", (3,), Region((0,), (3,)), foreign) for i in ("", "x.0")
    ]
    write_regions(tmp_path / "file", tensors)
    reader = RegionReader([tmp_path / "file"])

    def read(operator: str, size: int) -> list[int]:
        view, region = torch.empty(size, dtype=torch.uint8), Region((0,), (size,))
        name = f"module_state.{operator}.{index}"
        return values_for(
            Fragment(name, "param", (size,), region, view, True, True, view, 0, (0,), True), reader
        ).tolist()

    assert read("output", 3) == expected
    assert read("output", 5) == [*expected, 0, 0]
    assert read("embedding", 2) == [0, 0]


def test_a_vocabulary_with_another_number_of_axes_is_refused(tmp_path):
    write_regions(tmp_path / "file", [RegionTensor(NAME, "master", (6,), Region((0,), (6,)), torch.ones(6))])
    with raises("checkpoint-of-another-model", "(6,)"):
        values_for(fragment((2, 3), Region((0, 0), (2, 3))), RegionReader([tmp_path / "file"]))


def test_files_that_contradict_each_other_are_refused(tmp_path):
    saved(tmp_path / "one", 4)
    write_regions(tmp_path / "two", [RegionTensor(NAME, "master", (12,), Region((6,), (6,)), torch.ones(6))])
    with raises("checkpoint-damaged", "two"):
        RegionReader([tmp_path / "one", tmp_path / "two"])


def test_what_is_not_there_is_named(tmp_path):
    saved(tmp_path / "file", 4)
    with raises("tensor-missing", "master of other"):
        values_for(fragment((4, 3), Region((0, 0), (4, 3)), name="other"), RegionReader([tmp_path / "file"]))


def test_damage_is_not_loaded(tmp_path):
    saved(tmp_path / "file", 4)
    data = bytearray((tmp_path / "file").read_bytes())
    data[-1] ^= 1
    (tmp_path / "file").write_bytes(data)
    reader = RegionReader([tmp_path / "file"], verify=True)
    with raises("checkpoint-damaged", f"{tmp_path}/file", f"master of {NAME}"):
        values_for(fragment((6, 3), Region((0, 0), (6, 3))), reader)
    values_for(fragment((6, 3), Region((0, 0), (2, 3))), reader)  # the other entry is whole


@pytest.mark.parametrize("lead", [0, 12, 1 << 20])
def test_reading_ahead_leaves_nothing_out(tmp_path, lead):
    values = saved(tmp_path / "file", 6)
    fragments = [fragment((8, 3), Region((row, 0), (1, 3))) for row in range(8)]
    reader = RegionReader([tmp_path / "file"], verify=True, lazy=True)
    given_back = list(reading_ahead(fragments, reader, lead))
    assert given_back == fragments
    for row, one in enumerate(given_back[:6]):
        assert torch.equal(values_for(one, reader), values[row : row + 1])


class Recorded(list):
    """A sequence that tells which of its items were asked for by number."""

    def __init__(self, items):
        super().__init__(items)
        self.asked = []

    def __getitem__(self, number):
        self.asked.append(number)
        return super().__getitem__(number)


@pytest.mark.parametrize(
    ("lead", "beforehand"), [(0, [1, 2, 3, 4, 5]), (12, [1, 2, 3, 4, 5]), (13, [2, 3, 4, 5, 5]), (36, [3, 4, 5, 5, 5])]
)
def test_reading_ahead_keeps_to_its_lead(tmp_path, lead, beforehand):
    """Fragments of 12 bytes: those that begin within the lead are read in advance, and the next one in any case."""
    saved(tmp_path / "file", 5)
    fragments = Recorded(fragment((5, 3), Region((row, 0), (1, 3))) for row in range(5))
    seen, read = [], []

    class Reader(RegionReader):
        def will_read(self, name, slot, region):
            read.append(region.offset[0])

    for _ in reading_ahead(fragments, Reader([tmp_path / "file"]), lead):
        seen.append(len(fragments.asked))
    assert seen == beforehand and read == fragments.asked == [0, 1, 2, 3, 4]
