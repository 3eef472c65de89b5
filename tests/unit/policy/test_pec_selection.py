"""Sequential selection: balanced over ranks in every checkpoint, and no expert is forgotten."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moc.policy.pec_selection import DynamicK, load_aware_experts, sequential_experts
from moc.policy.token_ledger import TokenLedger
from tests.cases import each_row
from tests.errors import raises
from tests.unit.policy.routing import RECORDED, made_up, recorded


@st.composite
def rotations(draw):
    """(K, experts of a layer, expert-parallel ranks, layers with experts)."""
    ep, per_rank = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    return draw(st.integers(1, ep * per_rank)), ep * per_rank, ep, draw(st.integers(1, 12))


def test_figure_4_selection_is_reproduced():
    first, second = ([sequential_experts(t, layer, 1, 3, 3) for layer in range(4)] for t in (0, 1))
    assert first == [[0], [1], [2], [0]]
    assert second == [[1], [2], [0], [1]]


@given(rotations(), st.integers(0, 10**6), st.integers(0, 100))
def test_ranks_differ_by_one_expert_in_consecutive_layers(rotation, checkpoint, first):
    k, experts, ep, layers = rotation
    owners = Counter()
    for layer in range(first, first + layers):
        chosen = sequential_experts(checkpoint, layer, k, experts, ep)
        assert len(set(chosen)) == k and all(0 <= e < experts for e in chosen)
        owners.update(e * ep // experts for e in chosen)
    assert max(owners[r] for r in range(ep)) - min(owners[r] for r in range(ep)) <= 1


@given(rotations(), st.integers(0, 50), st.integers(0, 11))
def test_every_expert_is_saved_within_one_rotation(rotation, start, layer):
    k, experts, ep, _ = rotation
    rounds = -(-experts // k)
    saved = {e for t in range(start, start + rounds) for e in sequential_experts(t, layer, k, experts, ep)}
    assert saved == set(range(experts))


@each_row("k", [0, 9])
def test_invalid_k_is_refused(k):
    with raises("experts-per-snapshot-invalid", f"K = {k}", " 8"):
        sequential_experts(0, 0, k, 8, 2)


FAULTS, LIMIT = 32, 0.0375


def faulty_run(trace, start: DynamicK, dynamic: bool) -> tuple[list[int], list[float]]:
    """Trains over a trace with a snapshot after every iteration and evenly spread faults.

    After each fault the run goes on from the newest snapshot, and every expert from its newest version.

    Returns:
        K and the PLT of the whole training after each fault.
    """
    num_experts = {layer: len(row) for layer, row in trace[0].items()}
    whole = {layer: sum(sum(iteration[layer]) for iteration in trace) for layer in trace[0]}
    faults = {len(trace) * (fault + 1) // (FAULTS + 1) for fault in range(FAULTS)}
    ledger, now, ks, plts = TokenLedger.empty(num_experts), start, [], []
    for iteration, counts in enumerate(trace, start=1):
        ledger = ledger.after_iteration(counts)
        chosen = {
            layer: sequential_experts(iteration, place, now.k, num_experts[layer], 1)
            for place, layer in enumerate(num_experts)
        }
        stored = ledger.with_snapshot(chosen)
        ledger = stored.with_snapshot_completed(iteration)
        if iteration in faults:
            versions = {
                layer: {expert: version.iteration for expert, version in enumerate(ledger.memory[place])}
                for place, layer in enumerate(ledger.layers)
            }
            before = ledger.plt(whole)
            ledger = stored.after_recovery(versions)
            if dynamic:
                now = now.after_recovery(ledger.plt(whole) - before)
            ks.append(now.k)
            plts.append(ledger.plt(whole))
    return ks, plts


def assert_kept_below_the_limit(trace, num_experts):
    ks, plts = faulty_run(trace, DynamicK(1, num_experts, LIMIT), dynamic=True)
    assert len(plts) == FAULTS and max(plts) < LIMIT
    assert ks == sorted(ks) and 1 < ks[-1] < num_experts  # it has grown, and need not save all
    fixed = faulty_run(trace, DynamicK(1, num_experts, LIMIT), dynamic=False)[1]
    assert fixed[-1] > LIMIT
    quarters = [fixed[i] / fixed[-1] for i in (7, 15, 23)]
    assert quarters == pytest.approx([0.25, 0.5, 0.75], abs=0.06)  # Figure 15(b): a fixed K loses in proportion


def test_synthetic_run_with_32_faults_stays_below_limit():
    assert_kept_below_the_limit(made_up(iterations=1600, layers=3, experts=16), 16)


@pytest.mark.skipif(not RECORDED.exists(), reason="the recorded loads of SmartMoE are not on this machine")
def test_recorded_run_with_32_faults_stays_below_limit():
    assert_kept_below_the_limit(recorded(layers=24), 32)


@given(st.integers(1, 40), st.data())
def test_limit_is_kept_if_each_fault_costs_at_most_one_share(num_experts, data):
    now = DynamicK(data.draw(st.integers(1, num_experts)), num_experts, LIMIT)
    total = 0.0
    for cost in data.draw(st.lists(st.floats(0, 1), max_size=60)):
        if now.k == num_experts:
            cost = 0
        total += cost * now.share
        now = now.after_recovery(cost * now.share)
        assert total <= LIMIT * (1 + 1e-12)


@each_row(("k", "experts", "ks"), [(1, 16, [1, 2, 4, 8, 16]), (3, 16, [3, 6, 12, 16]), (5, 5, [5])])
def test_k_doubles_until_all_experts_are_saved(k, experts, ks):
    now, seen = DynamicK(k, experts, LIMIT), [k]
    assert now.share == LIMIT / len(ks)
    for _ in range(2 * len(ks) + 1):
        now = now.after_recovery(0.6 * now.share)
        seen += [now.k] if now.k != seen[-1] else []
    assert seen == ks


def test_k_is_unchanged_until_its_share_is_exceeded():
    now = DynamicK(1, 8, 0.04)  # four shares of one percent
    assert now.after_recovery(0.01).k == 1
    assert now.after_recovery(0.01).after_recovery(0.001).k == 2
    assert now.after_recovery(0.01).after_recovery(0.001).lost == pytest.approx(0.001)
    assert now.after_recovery(0.0201).k == 4  # one fault that costs two shares
    assert now.after_recovery(0).after_recovery(0) == now


@each_row(
    ("arguments", "code"),
    [
        ((0, 4), "experts-per-snapshot-invalid"),
        ((5, 4), "experts-per-snapshot-invalid"),
        ((1, 4, 0.0), "value-out-of-range"),
        ((1, 4, 1.5), "value-out-of-range"),
    ],
    ids=str,
)
def test_impossible_arguments_are_refused(arguments, code):
    with raises(code):
        DynamicK(*arguments)


def test_negative_token_loss_is_refused():
    with raises("tokens-not-counted", "-0.1"):
        DynamicK(1, 4).after_recovery(-0.1)


@st.composite
def loads(draw):
    """(unsaved tokens by layer, K, expert-parallel ranks)."""
    ep, per_rank = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    layers = draw(st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True))
    tokens = st.lists(st.integers(0, 9), min_size=ep * per_rank, max_size=ep * per_rank)
    return {layer: draw(tokens) for layer in layers}, draw(st.integers(1, ep * per_rank)), ep


def given_by_rank(chosen, experts, ep):
    return Counter(expert * ep // experts for layer in chosen.values() for expert in layer)


@given(loads())
def test_exactly_k_experts_of_each_layer_are_chosen(case):
    unsaved, k, ep = case
    chosen = load_aware_experts(unsaved, k, ep)
    assert list(chosen) == list(unsaved)
    for layer, experts in chosen.items():
        assert experts == sorted(set(experts)) and len(experts) == k
        assert all(0 <= expert < len(unsaved[layer]) for expert in experts)


@given(loads())
def test_busiest_experts_are_chosen_if_no_rank_is_full(case):
    unsaved, k, _ = case
    for layer, chosen in load_aware_experts(unsaved, k, 1).items():
        ranking = sorted(range(len(unsaved[layer])), key=lambda e: (-unsaved[layer][e], e))
        assert chosen == sorted(ranking[:k])


@given(loads())
def test_capacity_is_exceeded_only_if_layer_requires_it(case):
    unsaved, k, ep = case
    chosen = load_aware_experts(unsaved, k, ep)
    capacity, so_far = -(-len(unsaved) * k // ep), Counter()
    for layer in sorted(unsaved, reverse=True):
        per_rank, before = len(unsaved[layer]) // ep, Counter(so_far)
        so_far.update(expert // per_rank for expert in chosen[layer])
        over = [rank for rank in range(ep) if so_far[rank] > max(capacity, before[rank])]
        if over:
            for rank in range(ep):  # all that the others had room for is taken
                assert so_far[rank] >= min(capacity, before[rank] + per_rank)


def test_algorithm_1_matches_manual_calculation():
    """Two ranks of two experts, K = 1: each rank has room for one of the two layers.

    The last layer takes its busiest, on rank 1; so the first layer takes the busiest of rank 0, though rank 1 has one
    with more.
    """
    assert load_aware_experts({1: [1, 2, 9, 8], 3: [5, 6, 7, 7]}, k=1, ep=2) == {1: [1], 3: [2]}


def test_layers_are_processed_from_last_to_first():
    unsaved = {1: [0, 9], 3: [0, 9]}
    assert load_aware_experts(unsaved, 1, 2) == {1: [0], 3: [1]}
    assert load_aware_experts(dict(reversed(unsaved.items())), 1, 2) == {3: [1], 1: [0]}


def test_layer_keeps_its_share_if_a_rank_is_full():
    """Three ranks with one expert each, K = 2 and three layers: room for two of each rank.

    Layers 2 and 1 fill ranks 0 and 1; layer 0 finds room on rank 2 alone.  Rank 1 has more unsaved tokens than rank 0.
    """
    unsaved = {0: [1, 2, 0], 1: [9, 9, 0], 2: [9, 9, 0]}
    assert load_aware_experts(unsaved, 2, 3) == {0: [1, 2], 1: [0, 1], 2: [0, 1]}


def test_least_used_of_full_ranks_saves_more():
    """The same with six layers and room for four: layers 1 and 0 both need a rank that is full."""
    unsaved = {layer: [9, 8, 0] for layer in range(6)}
    chosen = load_aware_experts(unsaved, 2, 3)
    assert chosen == {0: [1, 2], 1: [0, 2]} | {layer: [0, 1] for layer in range(2, 6)}
    assert given_by_rank(chosen, 3, 3) == {0: 5, 1: 5, 2: 2}


@each_row(
    ("k", "ep", "code", "named"),
    [
        (0, 1, "experts-per-snapshot-invalid", ["K = 0", "layer 7", "4"]),
        (5, 2, "experts-per-snapshot-invalid", ["K = 5"]),
        (1, 3, "experts-not-divisible", ["ep = 3"]),
    ],
)
def test_unselectable_number_of_experts_is_refused(k, ep, code, named):
    with raises(code, *named):
        load_aware_experts({7: [1, 2, 3, 4]}, k, ep)
