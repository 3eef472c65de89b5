"""What workers tell one another runs nothing when it is read: plain values, and seals on what megatron-core pickles."""

import json
import math
import os
import random
from datetime import timedelta
from types import MappingProxyType

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from moc.runtime.collectives import ObjectDecodeError, decode_object, encode_object
from moc.runtime.groups import Groups, ObjectAuthenticationError, authenticated_object_functions
from moc.runtime.orders import End, StartWorker
from moc.state.operators import Detail
from tests.cases import each_row
from tests.unit.runtime.peers import OTHER_TOKEN, TOKEN

VALUES = [
    None,
    [True, -1, 2**70, 0.1, 1e-300, math.inf, "ä\n", b"\0\xff"],
    ((), (1, [2, (3,)]), {"a"}, frozenset({(1, "x")})),
    {1: "one", ("a", 2): {"record": [1], "dict": []}, None: {}},
    Detail.FULL,
    End(1, "why", False),
    {0: {"op": StartWorker(0, "1.1", 3, 1, True, 0, 4)}},
]


@each_row("value", VALUES)
def test_decoded_value_equals_encoded_value(value):
    read = decode_object(encode_object(value))
    assert read == value and repr(read) == repr(value)


def test_foreign_numbers_and_mappings_become_python_types():
    assert decode_object(encode_object([np.float64(0.1), MappingProxyType({1: 2})])) == [0.1, {1: 2}]
    assert math.isnan(decode_object(encode_object(math.nan)))


@each_row(
    "value", [object(), torch.zeros(1), lambda: 0, np.zeros(2), random.Random()], ids=lambda value: type(value).__name__
)
def test_unsupported_types_are_refused_by_sender(value):
    with pytest.raises(TypeError, match="exchange"):
        encode_object([value])


@each_row(
    "told",
    [
        {"record": ["os:system", "true"]},
        {"record": ["subprocess:Popen", ["true"]]},
        {"record": ["moc.runtime.collectives:gather", 1]},
        {"record": ["moc.runtime.membership:End", 1]},
        {"record": ["moc.runtime.membership:os.system", 1]},
        {"enum": ["moc.runtime.membership:End", "code"]},
        {"enum": ["moc.state.operators:Detail", "NONE"]},
        {"record": [["os"], 1]},
        {"dict": [[[], 1]]},
        {"tuple": 1},
        {"what": []},
        {"a": 1, "b": 2},
        {"bytes": "?"},
    ],
)
def test_untrusted_records_are_refused_by_decoder(told):
    with pytest.raises(ObjectDecodeError):
        decode_object(json.dumps(told).encode())


def test_arbitrary_bytes_give_value_or_decode_error():
    rng, whole = random.Random(0), encode_object(VALUES)
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            decode_object(bytes(data))
        except ObjectDecodeError:
            pass
    for data in (b"", b"[" * 100_000, b"\xff", os.urandom(100)):
        with pytest.raises(ObjectDecodeError):
            decode_object(data)


class Bomb:
    """A pickle that leaves a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_groups_sign_objects_for_their_job():
    cpu = torch.device("cpu")
    readers = {
        job: authenticated_object_functions(TOKEN, lambda _, job=job: (job, 3, "group0")) for job in ("job", "another")
    }
    groups = Groups(0, 1, "gloo", timedelta(seconds=60), cpu, TOKEN)
    groups.install()
    try:
        groups.begin(dist.HashStore(), 3, "job")
        sealed = c10d._object_to_tensor("an object", cpu, None)
        assert readers["job"]["_tensor_to_object"](*sealed, None) == "an object"
        with pytest.raises(ObjectAuthenticationError):
            readers["another"]["_tensor_to_object"](*sealed, None)
    finally:
        groups.destroy()


@each_row(
    "token, where",
    [
        (OTHER_TOKEN, ("job", 1, "group0")),
        (TOKEN, ("another", 1, "group0")),
        (TOKEN, ("job", 0, "group0")),
        (TOKEN, ("job", 1, "group1")),
    ],
    ids=["another token", "another job", "another generation", "another group"],
)
def test_object_is_read_only_with_current_signature(tmp_path, token, where):
    cpu, group0 = torch.device("cpu"), object()
    mine = authenticated_object_functions(TOKEN, lambda _: ("job", 1, "group0"))
    bomb = Bomb(str(tmp_path / "ran"))
    tensor, size = authenticated_object_functions(token, lambda _: where)["_object_to_tensor"](bomb, cpu, group0)
    for sent, nbytes in ((tensor, size), c10d._object_to_tensor(bomb, cpu, group0), (tensor[:5], torch.tensor([5]))):
        with pytest.raises(ObjectAuthenticationError, match="generation 1"):
            mine["_tensor_to_object"](sent, nbytes, group0)
    assert not (tmp_path / "ran").exists()
    tensor, size = mine["_object_to_tensor"]({"plain": (1, 2)}, cpu, group0)
    padded = tensor.resize_(tensor.numel() + 9)  # as torch does where another worker's object is larger
    assert mine["_tensor_to_object"](padded, size, group0) == {"plain": (1, 2)}
