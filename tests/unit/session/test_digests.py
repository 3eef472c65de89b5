"""The comparison of a recovered state with the digests of its iteration."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moc.session.digests import KnownDigests, LocalPart, add_parts, compare_digests, hash_values, unlike_masters
from moc.state.digests import MODULE
from moc.state.operators import Detail, Region
from tests.fake_cuda import GPU, FakeCuda

A, B, C = ({"master": value} for value in (2, 4, 3))
KEPT = LocalPart("chunks", A, is_kept=True)
CHANGED = LocalPart("chunks", B, is_kept=False)
LOADED = LocalPart("chunks", A)
OTHER = LocalPart("chunks", B)
REST = LocalPart("others", C)
RIGHT = {("embedding", "master"): 5}


def compared(*parts: LocalPart, total=RIGHT, reference=None, **more):
    """The result for one operator."""
    return compare_digests(7, [{"embedding": [part]} for part in parts], total, reference, **more)


def test_known_digests_verify_complete_state():
    assert compared(LOADED, REST, reference=RIGHT).verified == 1
    wrong = compared(LOADED, REST, reference={("embedding", "master"): 6})
    assert (wrong.verified, wrong.wrong, wrong.unverified) == (0, ("embedding",), ())


def test_survivors_verify_kept_state_without_copies():
    assert compared(KEPT, LOADED).verified == 1  # a replica of what the other has kept
    assert compared(KEPT, REST).unverified == ("embedding",)  # the rest is loaded, and nothing is known of it
    assert compared(LOADED, LOADED).unverified == ("embedding",)


def test_changed_state_is_named_with_its_worker():
    for parts in ((KEPT, CHANGED), (KEPT, OTHER)):
        found = compared(*parts)
        assert (found.wrong, found.ranks) == (("embedding",), {1})
    assert compared(OTHER, KEPT).ranks == {0}  # the worker that has kept its state is right
    assert compared(CHANGED, REST, reference=RIGHT).wrong == ("embedding",)


def test_stale_experts_have_no_digest():
    found = compared(LOADED, reference={("embedding", "master"): 6}, stale=["embedding"])
    assert (found.verified, found.unverified, found.wrong) == (0, ("embedding",), ())


def test_padding_of_another_layout_is_not_compared():
    found = compared(LOADED, total={("embedding", "master:96"): 5}, reference={("embedding", "master:128"): 6})
    assert found.unverified == ("embedding",)


def test_omitted_user_module_state_is_not_compared():
    total = RIGHT | {("embedding", MODULE): 7}
    assert compared(LOADED, total=total, reference=RIGHT).unverified == ("embedding",)
    assert compared(LOADED, total=total, reference=RIGHT | {("embedding", MODULE): 8}).wrong == ("embedding",)


def test_parts_on_any_number_of_workers_add_up_to_the_digest():
    first, second, both = (
        LocalPart(name, A, elements={"master": count}) for name, count in (("1", 6), ("2", 4), ("3", 10))
    )
    complete = {("embedding", "master"): 10}
    for parts in ([first, first, second], [second, first]):
        assert add_parts([{"embedding": [part]} for part in parts], complete) == (
            {("embedding", "master"): 4},
            frozenset(),
        )
    assert add_parts([{"embedding": [both]}], complete) == ({("embedding", "master"): 2}, frozenset())
    for parts in ([first], [first, both]):  # some elements are nowhere, or in two parts
        assert add_parts([{"embedding": [part]} for part in parts], complete)[1] == {"embedding"}
    assert add_parts([{}], complete)[1] == {"embedding"}


class Weights:
    """A state of one tensor with 16-bit weights and fp32 masters."""

    def __init__(self, dtype: torch.dtype):
        self.master = torch.tensor([1.001, float("nan"), -3.3])
        self.param = self.master.to(dtype)

    def operators(self):
        return ["embedding"]

    def fragments(self, operators, detail):
        view = self.master if detail is Detail.MASTER else self.param
        yield SimpleNamespace(name="w", region=Region((0,), (3,)), operator="embedding", view=view)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_that_do_not_follow_from_masters_are_named(dtype):
    state: Any = Weights(dtype)
    assert unlike_masters(state) == set()
    state.param.view(torch.int16)[1] ^= 1  # also of a NaN
    assert unlike_masters(state) == {"embedding"}


def test_weights_are_compared_with_masters_in_host_memory():
    state: Any = Weights(torch.bfloat16)
    with FakeCuda():
        state.param, state.master = torch.empty(3, dtype=torch.bfloat16, device=GPU), torch.empty(3)
        assert unlike_masters(state) == set()


def test_changed_schedules_and_counters_are_named():
    state, updates = {"scheduler": {"num_steps": 14}, "grad_scaler": None}, {"embedding": 7}
    known = KnownDigests(scalars=(7, hash_values(state), updates))
    assert known.changed_scalars(7, state | {"ledger": 1}, {"embedding": 7, "output": 3}) == []
    assert known.changed_scalars(7, state | {"scheduler": {"num_steps": 15}}, updates) == ["scheduler"]
    assert known.changed_scalars(7, state, {"embedding": 3}) == ["updates of embedding"]
    assert known.changed_scalars(8, {}, {}) == []  # of another iteration


def test_only_newest_digests_are_retained():
    known = KnownDigests()
    for iteration in range(9):
        known.add(iteration, {})
    assert sorted(known.totals) == [5, 6, 7, 8]
