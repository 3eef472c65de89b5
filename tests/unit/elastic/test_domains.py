"""Domains: tokens are dispatched within each of them, and replicas in all of them survive together."""

import json
from math import comb

import numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.elastic.allocation import domain_sizes, feasible_replicas, min_replicas_per_domain
from moc.elastic.dispatch import even_capacities, exchange_of_rank, level_capacities, tokens_per_rank_in_domains
from moc.elastic.plan import Plan, PlanSettings, make_plan
from moc.elastic.survival import count_survived
from tests.cases import each_row
from tests.errors import raises


def any_case(seed):
    """Members, loads and settings with room for all experts."""
    rng = numpy.random.default_rng(seed)
    experts, ranks, slots = int(rng.integers(1, 13)), int(rng.integers(1, 4)), int(rng.integers(1, 5))
    nodes = -(-experts // (slots * ranks)) + int(rng.integers(0, 12))
    loads = {layer: rng.integers(0, rng.choice([1, 3, 500]), experts).tolist() for layer in (1, 3)}
    wanted = PlanSettings(slots, int(rng.integers(1, 5)), None, ranks, ranks * int(rng.integers(1, 5)))
    return rng, experts, sorted(rng.choice(40, nodes, replace=False).tolist()), loads, wanted


@each_row(
    ("given", "found"),
    [
        ((4, 1, 4, 8, 256), (4,)),
        ((4, 1, 4, 8, 2), (2, 2)),
        ((5, 1, 4, 8, 2), (3, 2)),  # three domains would leave one node with half of the experts
        ((3, 1, 4, 8, 2), (3,)),
        ((4, 2, 8, 8, 4), (2, 2)),
        ((5, 3, 8, 8, 4), (1, 1, 1, 1, 1)),  # two nodes of 3 would be more than 4
        ((2048, 8, 64, 256, 256), (32,) * 64),
        ((2047, 8, 64, 256, 256), (32,) * 63 + (31,)),
        ((1, 1, 2, 4, 1), (1,)),  # no room anyway
        ((4, 1, 0, 0, 2), (2, 2)),  # every node has all experts
    ],
)
def test_fewest_domains_with_room_and_requested_ranks(given, found):
    assert domain_sizes(*given) == found


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6))
def test_domain_has_all_experts_and_f_holders_overall(seed):
    """Through any history of members."""
    rng, experts, members, loads, wanted = any_case(seed)
    previous = None
    for step in range(3):
        now = make_plan(members, loads, wanted, previous)
        assert now == make_plan(members, loads, wanted, previous)
        assert sum(now.domains) == len(members) and max(now.domains) - min(now.domains) <= 1
        fit = [feasible_replicas(wanted.min_replicas, experts, n, wanted.slots * wanted.ranks) for n in now.domains]
        stops = numpy.cumsum(now.domains) * now.ranks
        for layer in loads:
            held = now.replica_matrix(layer)
            assert all((part.sum(axis=1) >= 1).all() for part in numpy.split(held, stops[:-1], axis=1))
            by_node = now.replicas_by_node(layer)
            assert by_node.max() <= 1 and by_node.sum(axis=1).min() >= min(wanted.min_replicas, sum(fit))
        for nodes, stop in zip(now.domains, numpy.cumsum(now.domains), strict=True):
            assert sorted(now.columns[stop - nodes : stop]) == list(range(stop - nodes, stop))
            assert now.domain_of((stop - 1) * now.ranks) == slice((stop - nodes) * now.ranks, stop * now.ranks)
        gone = int(rng.integers(0, len(now.domains) + 1))
        kept = rng.permutation(members)[gone:].tolist()
        if len(kept) * wanted.slots * wanted.ranks >= experts:
            members = sorted([*kept, *[100 * (step + 1)] * int(rng.integers(0, 2))])
        previous = now


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from([level_capacities, even_capacities]))
def test_tokens_stay_in_their_domain_and_none_is_lost(seed, capacities):
    rng, experts, members, loads, wanted = any_case(seed)
    made = make_plan(members, loads, wanted)
    counts, held = rng.integers(0, 50, (experts, made.num_ranks)), made.replica_matrix(1)
    computed = numpy.zeros_like(counts)
    for rank in range(made.num_ranks):
        domain = made.domain_of(rank)
        mine, replicas = counts[:, domain], held[:, domain]
        flow = exchange_of_rank(mine, capacities(mine.sum(axis=1), replicas), rank - domain.start)
        assert (flow.sends.sum(axis=1) == counts[:, rank]).all()
        assert (flow.sends <= replicas * counts[:, rank, None]).all()
        computed[:, rank] = flow.receives.sum(axis=1)
    assert (computed <= held * counts.sum()).all()
    starts = numpy.cumsum([0, *made.domains])[:-1] * made.ranks
    assert (numpy.add.reduceat(computed, starts, axis=1) == numpy.add.reduceat(counts, starts, axis=1)).all()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6))
def test_domains_survive_json_and_default_to_one(seed):
    _, _, members, loads, wanted = any_case(seed)
    made = make_plan(members, loads, wanted)
    told = json.loads(json.dumps(made.to_json()))
    assert Plan.from_json(told) == made and Plan.from_json(told).domains == made.domains
    del told["domains"]
    old = Plan.from_json(told)
    assert old.domains == (len(members),) and (old == made) == (len(made.domains) == 1)
    for domains in ([len(members), 1], [len(members) + 1, -1], []):
        with raises("expert-plan-invalid"):
            Plan.from_json(made.to_json() | {"domains": domains})
    among = made.restricted_to(members, [True] * made.num_ranks)
    assert among.domains == (len(members),) and (among.replica_matrix(1) == made.replica_matrix(1)).all()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6))
def test_work_of_domains_is_work_of_all_tokens(seed):
    rng, experts, members, loads, wanted = any_case(seed)
    made, tokens = make_plan(members, loads, wanted), rng.integers(0, 10_000, experts)
    work = made.tokens_per_rank(1, tokens.tolist())
    assert work.sum() == tokens.sum() and (work[~made.replica_matrix(1).any(axis=0)] == 0).all()
    assert (
        tokens_per_rank_in_domains(tokens, made.replica_matrix(1), [made.num_ranks])
        == level_capacities(tokens, made.replica_matrix(1)).sum(axis=0)
    ).all()


def test_domain_imbalance_uses_its_own_busiest_rank():
    """One has its hot expert on one rank alone: others cannot help."""
    table = numpy.array([[0], [1], [0], [0], [0], [1]])
    tokens = [600, 600]
    apart = Plan(tuple(range(6)), tuple(range(6)), 2, 1, {0: table}, (2, 4))
    assert apart.tokens_per_rank(0, tokens).tolist() == [200, 200, 134, 133, 133, 400]
    assert apart.imbalance(0, tokens) == 2.0 and apart.imbalance(0, [0, 0]) == 1.0
    assert Plan(tuple(range(6)), tuple(range(6)), 2, 1, {0: table}, (6,)).imbalance(0, tokens) == 1.5


def test_min_replicas_are_divided_among_domains():
    assert min_replicas_per_domain(2, [1, 1]) == 1 and min_replicas_per_domain(3, [2, 2]) == 2
    assert min_replicas_per_domain(3, [2, 1]) == 2 and min_replicas_per_domain(9, [2, 1]) == 2
    assert min_replicas_per_domain(2, [2]) == 2


def test_survival_of_many_nodes_in_equal_domains_is_exact():
    """Of 40 nodes, as of the 20 pairs that have the same place in both domains."""
    loads = {0: list(range(1, 17)), 1: list(range(17, 1, -1))}
    before = make_plan(range(40), loads, PlanSettings(2, 2, 0, max_domain_ranks=20))
    made = make_plan(range(40), loads, PlanSettings(2, 2, 0, max_domain_ranks=20), before)
    assert before.domains == made.domains == (20, 20)
    held = made.replicas_by_node(0)
    assert (held[:, ::2] == held[:, 1::2]).all()
    found, alone = count_survived(held, 4), count_survived(held[:, ::2], 2)
    assert found[:2] == [1, 40] and found[2] == comb(40, 2) - (comb(20, 1) - alone[1])


def test_groups_are_equal_in_domains_of_different_sizes():
    """Experts with equally many replicas in one domain may have unequally many in a larger one."""
    made = make_plan(range(7), {0: [12, 23, 17, 4, 15, 12]}, PlanSettings(2, 2, 0, max_domain_ranks=4))
    assert made.domains == (4, 3)
    assert count_survived(made.replicas_by_node(0), 7) == [
        1,
        7,
        19,
        24,
        12,
        0,
        0,
        0,
    ]  # by number they survive 17 of 2 lost
