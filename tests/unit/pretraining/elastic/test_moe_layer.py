"""Routes of tokens: what goes where arrives there, sorted by slot, and comes back in order."""

from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from moc.elastic.dispatch import even_capacities, exchange_of_rank, level_capacities


@pytest.fixture(scope="module")
def moe_layer():
    from megatron.pretraining.process import cpu

    cpu.install()
    from megatron.pretraining.elastic import moe_layer

    return moe_layer


@st.composite
def worlds(draw):
    """Counts of tokens, replicas, and slots of each rank, in any order and with gaps."""
    experts, ranks = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    generator = numpy.random.default_rng(draw(st.integers(0, 2**32)))
    replicas = (generator.random((experts, ranks)) < 0.5).astype(numpy.int64)
    replicas[numpy.arange(experts), generator.integers(ranks, size=experts)] = 1
    counts = generator.integers(0, 6, (experts, ranks))
    slots = []
    for rank in range(ranks):
        held = [*numpy.flatnonzero(replicas[:, rank]).tolist(), None]
        generator.shuffle(held)
        slots.append([None if one is None else int(one) for one in held])
    return counts, replicas, slots, draw(st.sampled_from([level_capacities, even_capacities]))


@given(worlds())
def test_every_token_is_dispatched_to_a_holder_and_combined(moe_layer, world):
    counts, replicas, slots, capacities = world
    shares, ranks = capacities(counts.sum(axis=1), replicas), range(counts.shape[1])
    routes = [moe_layer.route_of(exchange_of_rank(counts, shares, rank), slots[rank]) for rank in ranks]
    orders = [route.on_device(torch.device("cpu")) for route in routes]
    tokens = [[(e, rank, i) for e in range(len(counts)) for i in range(counts[e, rank])] for rank in ranks]
    sent = [[tokens[rank][i] for i in orders[rank][0]] for rank in ranks]
    arrived = swapped(sent, [route.sent for route in routes], [route.received for route in routes])
    by_slot = [[arrived[rank][i] for i in orders[rank][1]] for rank in ranks]
    for rank in ranks:
        wanted = [slot for slot, n in zip(slots[rank], routes[rank].in_slots, strict=True) for _ in range(n)]
        assert [token[0] for token in by_slot[rank]] == wanted
    restored = [[by_slot[rank][i] for i in orders[rank][2]] for rank in ranks]
    assert restored == arrived
    assert swapped(restored, [route.received for route in routes], [route.sent for route in routes]) == sent
    assert [sorted(one) for one in sent] == tokens


def swapped(sent, sizes, received):
    """An all-to-all."""
    ranks = range(len(sent))
    ends = [numpy.cumsum([0, *size]) for size in sizes]
    parts = [[one[end[to] : end[to + 1]] for to in ranks] for one, end in zip(sent, ends, strict=True)]
    arrived = [[token for of in parts for token in of[rank]] for rank in ranks]
    assert [len(one) for one in arrived] == [sum(one) for one in received]
    return arrived


TOKENS, EXPERTS, TOPK, HIDDEN, RANKS = 16, 6, 2, 8, 4
REPLICAS = numpy.array([[1, 0, 1, 0], [1, 1, 1, 1], [0, 1, 0, 1], [1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]])


@pytest.fixture
def dispatch(moe_layer, monkeypatch):
    """Passes a micro batch through a dispatcher of one rank of four, whose collectives do nothing.

    Tensors are on the device ``meta``, which has no values.  So every read of them, and every size from them, raises,
    except the counts of tokens that a test gives.
    """
    dist.init_process_group("fake", rank=1, world_size=RANKS, store=FakeStore())
    group = dist.group.WORLD
    groups = SimpleNamespace(ep=group, expt_tp=group, tp_ep=group)
    dispatcher = moe_layer.ElasticDispatcher(SimpleNamespace(moe_router_topk=TOPK), groups, group)
    dispatcher.assign((4, 1, None, 2), REPLICAS, level_capacities)
    waits = []

    def passed(counts):
        class Copy:
            def __init__(self, values):
                assert (values.device.type, values.numel()) == ("meta", counts.size)

            def wait(self):
                waits.append(self)
                return torch.from_numpy(counts.ravel())

        monkeypatch.setattr(moe_layer, "HostCopy", Copy)
        inputs = torch.empty(TOKENS, 1, HIDDEN, device="meta", requires_grad=True)
        probs = torch.empty(TOKENS, EXPERTS, device="meta", requires_grad=True)
        chosen = torch.empty(TOKENS, EXPERTS, dtype=torch.bool, device="meta")
        sent = dispatcher.dispatch_preprocess(inputs, chosen, probs)
        computed, in_slots, weights = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*sent))
        output = dispatcher.token_combine(dispatcher.combine_preprocess(computed * weights[:, None]))
        dispatcher.combine_postprocess(output).sum().backward()
        assert inputs.grad is not None and probs.grad is not None and len(sent[0]) == len(sent[1])
        assert sum(in_slots.tolist()) == len(computed) == len(weights) and in_slots[2] == 0
        return len(sent[0]), len(waits)

    yield passed
    dist.destroy_process_group()


@pytest.mark.parametrize("dropped", [0, 3, TOKENS * TOPK])
def test_layer_synchronizes_with_device_once(dispatch, dropped):
    counts = numpy.random.default_rng(0).multinomial(TOKENS * TOPK - dropped, [1 / EXPERTS] * EXPERTS, size=RANKS)
    assert dispatch(counts) == (TOKENS * TOPK - dropped, 1)


@pytest.mark.parametrize("garbage", [-1, TOKENS + 1, 1 << 40])
def test_counts_of_aborted_collective_reach_no_kernel(dispatch, garbage):
    with pytest.raises(ValueError):
        dispatch(numpy.full((RANKS, EXPERTS), garbage))
