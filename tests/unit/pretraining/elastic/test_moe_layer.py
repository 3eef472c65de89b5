"""Routes of tokens: what goes where arrives there, sorted by slot, and comes back in order."""

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
def test_every_token_reaches_a_holder_of_its_expert_and_comes_back(moe_layer, world):
    counts, replicas, slots, capacities = world
    shares, ranks = capacities(counts.sum(axis=1), replicas), range(counts.shape[1])
    routes = [moe_layer.route_of(exchange_of_rank(counts, shares, rank), slots[rank]) for rank in ranks]
    tokens = [[(e, rank, i) for e in range(len(counts)) for i in range(counts[e, rank])] for rank in ranks]
    sent = [[tokens[rank][i] for i in routes[rank].send_order] for rank in ranks]
    arrived = swapped(sent, [route.sent for route in routes], [route.received for route in routes])
    by_slot = [[arrived[rank][i] for i in routes[rank].by_slot] for rank in ranks]
    for rank in ranks:
        wanted = [slot for slot, n in zip(slots[rank], routes[rank].in_slots, strict=True) for _ in range(n)]
        assert [token[0] for token in by_slot[rank]] == wanted
    restored = [[by_slot[rank][i] for i in routes[rank].restore] for rank in ranks]
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
