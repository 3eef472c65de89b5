"""Part of a file is the file that its writer would have made of these boxes alone."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.state.operators import Region
from moc.store.header import extract_sub_file
from moc.store.shard_file import BoxTensor, write_shard_file
from tests.cases import each_row

SLOTS = ("master", "exp_avg", "param")
NAMES = ("output_layer.weight", *(f"decoder.layers.0.mlp.experts.experts.{e}.linear_fc1.weight" for e in range(4)))
TENSORS = [
    BoxTensor(name, slot, (8, 3), Region((number, 0), (2 + number % 2, 3)), torch.rand(2 + number % 2, 3, dtype=dtype))
    for number, name in enumerate(NAMES)
    for slot, dtype in zip(SLOTS, (torch.float32, torch.float32, torch.bfloat16), strict=True)
]
boxes = st.sets(st.sampled_from([(tensor.name, tensor.slot) for tensor in TENSORS]))


@settings(max_examples=60, deadline=None)
@given(boxes, boxes)
def test_sub_file_matches_file_of_same_boxes(tmp_path_factory, saved, kept):
    directory = tmp_path_factory.mktemp("files")
    of = lambda chosen: [tensor for tensor in TENSORS if (tensor.name, tensor.slot) in chosen]  # noqa: E731
    entry, alone = (write_shard_file(directory / name, of(c)) for name, c in (("all", saved), ("some", saved & kept)))
    source = (directory / "all").read_bytes()
    found = extract_sub_file("all", entry, source[: entry.header_bytes], lambda box: (box.name, box.slot) in kept)
    if not saved & kept:
        assert found is None
        return
    assert found is not None and found.entry == alone
    assert found.header + b"".join(source[a:b] for a, b in found.spans) == (directory / "some").read_bytes()
    assert all(a < b for a, b in found.spans) and all(
        b < c for (_, b), (c, _) in zip(found.spans, found.spans[1:], strict=False)
    )


@each_row("harm", [lambda h: h[:100], lambda h: b"\xff" * 8 + h[8:], lambda h: h.replace(b"F32", b"F31")])
def test_unreadable_header_is_refused(harm, tmp_path: Path):
    entry = write_shard_file(tmp_path / "all", TENSORS)
    header = harm((tmp_path / "all").read_bytes()[: entry.header_bytes])
    with pytest.raises(ValueError):
        extract_sub_file("all", entry, header, lambda box: box.slot == "master")
