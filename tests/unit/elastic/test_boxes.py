"""What is sent from whom to whom when a plan changes."""

import numpy
import pytest

from moc.elastic.boxes import NoSourceError, Tensor, experts_held, experts_left, transfers
from moc.elastic.plan import Settings, plan
from moc.state.region import Region

LAYERS, EXPERTS = 3, 16
TENSORS = [
    Tensor(f"layers.{layer}.expert.{expert}", name, slot, Region((0, 0), (64, 32)), 4)
    for layer in range(LAYERS)
    for expert in range(EXPERTS)
    for name in ("fc1", "fc2")
    for slot in ("master", "exp_avg", "exp_avg_sq")
]


def loads(seed):
    rng = numpy.random.default_rng(seed)
    return {layer: (1000 * rng.pareto(1, EXPERTS)).astype(int).tolist() for layer in range(LAYERS)}


def changed(nodes, members, ranks=1):
    """Holders before and after, and the transfers between."""
    before = plan(range(nodes), loads(0), Settings(6, ranks=ranks))
    after = plan(members, loads(1), Settings(6, ranks=ranks), before)
    left, wanted = experts_left(before, members), experts_held(after)
    return left, wanted, transfers(TENSORS, left, wanted, most=1024)


@pytest.mark.parametrize(
    ("nodes", "members", "ranks"),
    [(10, [0, 1, 2, 4, 5, 6, 7, 8, 9], 1), (6, range(10), 1), (6, [0, 2, 3, 4, 5, 20], 2), (10, range(10), 1)],
)
def test_each_gets_what_it_lacks_once_from_one_that_has_it_and_all_send_alike(nodes, members, ranks):
    left, wanted, found = changed(nodes, members, ranks)
    got = {rank: {o for o in left if rank in left[o]} for rank in range(len(members) * ranks)}
    elements: dict = {}
    for step in (0, 1):
        arrived = [(one.piece, one.target) for one in found if one.round < step]
        for one in (one for one in found if one.round == step):
            has_it = one.piece.operator in got[one.source] or (one.piece, one.source) in arrived
            assert has_it and one.source != one.target and one.piece.nbytes <= 1024
            key = one.target, one.piece.operator, one.piece.name, one.piece.slot
            elements.setdefault(key, numpy.zeros((64, 32), int))[one.piece.region.slices()] += 1
    assert all((count == 1).all() for count in elements.values())
    lacking = {(rank, o) for o in wanted for rank in wanted[o] if rank not in left[o]}
    assert {key[:2] for key in elements} == lacking and len(elements) == 6 * len(lacking)
    sent = numpy.zeros(len(got))
    for one in found:
        sent[one.source] += one.piece.nbytes
    alone = numpy.zeros(len(got))  # what no other has, and somebody needs, goes out once
    for operator in {operator for _, operator in lacking if len(left[operator]) == 1}:
        alone[left[operator][0]] += sum(tensor.nbytes for tensor in TENSORS if tensor.operator == operator)
    assert (sent <= numpy.maximum(1.5 * sent.mean(), alone)).all()


def test_what_nobody_holds_must_be_loaded():
    with pytest.raises(NoSourceError, match=r"no rank holds layers\.0\.expert\.3: load a checkpoint"):
        transfers(TENSORS, {}, {"layers.0.expert.3": [1]})
    assert transfers(TENSORS, {}, {}) == []


def test_a_single_holder_sends_each_byte_once_and_the_new_ones_pass_it_on():
    dense = [Tensor("layers.0.attention", "qkv", "master", Region((0,), (4096,)), 4)]
    found = transfers(dense, {"layers.0.attention": [0]}, {"layers.0.attention": range(5)}, most=256)
    sent = [sum(one.piece.nbytes for one in found if one.source == rank) for rank in range(5)]
    assert sum(sent) == 4 * 4 * 4096 and max(sent) <= 1.5 * sum(sent) / 5
