"""Values of modules as bytes."""

from __future__ import annotations

import collections
import enum
import json
import math
import random

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moc.state.module_bytes import ModuleStateError, pack, size_of, unpack
from tests.cases import each_row

VALUES = {
    "none": None,
    "flag": True,
    "calls": 2**70,
    "rate": 0.1,
    "infinite": -math.inf,
    "phase": 1 + 2j,
    "text": "ä",
    "bytes": b"\x00\xff",
    "nested": {"a": [1, (2.5, {3})], 4: torch.arange(3)},
    "last": collections.deque([1, 2], maxlen=5),
    "tensor": torch.randn(3, 4),
    "bf16": torch.randn(5).to(torch.bfloat16),
    "scalar": torch.tensor(7),
    "empty": torch.zeros(0, 3),
    "transposed": torch.arange(6).reshape(2, 3).t(),
    "expanded": torch.ones(1).expand(4),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "array": numpy.arange(4.0),
    "reversed": numpy.arange(3)[::-1],
    "number": numpy.float32(1.5),
}


def packed(values: dict) -> torch.Tensor:
    target = torch.zeros(size_of(values) + 100, dtype=torch.uint8)
    pack(values, target)
    return target


def test_values_keep_type_dtype_and_bits():
    read = unpack(packed(VALUES), {})
    assert repr(read) == repr(VALUES)
    assert read["last"].maxlen == 5 and read["bf16"].dtype is torch.bfloat16


def test_array_of_other_byte_order_keeps_values():
    assert unpack(packed({"a": numpy.arange(3, dtype=">i4")}), {})["a"].tolist() == [0, 1, 2]


def test_existing_tensors_and_generators_are_filled_in_place():
    generator, tensor = torch.Generator().manual_seed(3), torch.zeros(3, 4)
    expected = torch.rand(2, generator=torch.Generator().manual_seed(3))
    data = packed({"tensor": VALUES["tensor"], "generator": generator, "counts": collections.Counter("aab")})
    other, counts = torch.Generator(), collections.Counter()
    read = unpack(data, {"tensor": tensor, "generator": other, "counts": counts})
    assert read["tensor"] is tensor and torch.equal(tensor, VALUES["tensor"])
    assert read["generator"] is other and torch.equal(torch.rand(2, generator=other), expected)
    assert read["counts"] is counts and counts == collections.Counter("aab")


@each_row("value", [{}, {"deque": [], "maxlen": 1 << 70}, {"list": [{}]}, {"dict": [[{}, 1]]}, {"": 0}])
def test_header_with_invalid_values_is_refused(value):
    header = json.dumps({"values": {"a": value}, "tensors": []}).encode()
    text = len(header).to_bytes(8, "little") + header
    with pytest.raises(ModuleStateError):
        unpack(torch.frombuffer(bytearray(text), dtype=torch.uint8), {})


def test_zeros_contain_no_values():
    assert unpack(torch.zeros(64, dtype=torch.uint8), {}) == {}


def test_too_small_target_is_refused():
    with pytest.raises(ModuleStateError):
        pack(VALUES, torch.zeros(64, dtype=torch.uint8))


class Color(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


@each_row("value", [object(), Color.RED, Point(1, 2), [Point(1, 2)]])
def test_unsupported_types_are_refused_and_need_no_memory(value):
    assert size_of({"value": value}) == size_of({})
    with pytest.raises(ModuleStateError, match="value"):
        pack({"value": value}, torch.zeros(200, dtype=torch.uint8))


@given(st.randoms(use_true_random=False), st.integers(1, 20))
def test_damaged_bytes_are_refused_or_read(choose: random.Random, flips: int):
    data = packed(VALUES)
    for _ in range(flips):
        data[choose.randrange(len(data))] = choose.randrange(256)
    try:
        unpack(data, {})
    except ModuleStateError:
        pass
