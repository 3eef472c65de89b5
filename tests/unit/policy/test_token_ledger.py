"""The token ledger agrees with a world that keeps, for each state of each expert, the iterations that it has seen."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.policy.token_ledger import TokenLedger
from tests.cases import each_row
from tests.errors import raises

LAYERS = {1: 3, 4: 2}
EXPERTS = [(layer, expert) for layer, experts in LAYERS.items() for expert in range(experts)]


def chosen(draw, keys):
    """Some of these experts, by layer."""
    picked = draw(st.sets(st.sampled_from(keys))) if keys else set()
    return {layer: sorted(e for at, e in picked if at == layer) for layer in LAYERS}


def counts(tokens):
    """By layer, from one number."""
    return {layer: [tokens + 10 * layer + expert for expert in range(n)] for layer, n in LAYERS.items()}


class World:
    """Training with partial snapshots; the state of an expert is the list of the tokens that it has seen, by iteration.

    ``saved`` has, by tier and iteration, the states and ``ledgers`` the ledger that was stored with them.
    """

    def __init__(self):
        self.ledger = TokenLedger.empty(LAYERS)
        self.seen = [None]  # counts of each iteration of this time line, from 1
        self.live = {key: {} for key in EXPERTS}
        self.saved = {"memory": {}, "storage": {}}
        self.complete = {"memory": [], "storage": []}
        self.ledgers = {}

    def step(self, tokens):
        self.seen.append(counts(tokens))
        for layer, expert in EXPERTS:
            self.live[layer, expert][len(self.seen) - 1] = self.seen[-1][layer][expert]
        self.ledger = self.ledger.after_iteration(self.seen[-1])

    def begin(self, to_memory, to_storage):
        at = self.ledger.iteration
        self.ledger = self.ledger.with_snapshot(to_memory, to_storage)
        self.ledgers[at] = TokenLedger.from_state(json.loads(json.dumps(self.ledger.state_dict())))
        for tier, experts in (("memory", to_memory), ("storage", to_storage)):
            if experts is not None:
                keys = [(layer, e) for layer, numbers in experts.items() for e in numbers]
                self.saved[tier][at] = {key: dict(self.live[key]) for key in keys}

    def finish(self, tier):
        """The oldest snapshot under way to a tier is complete now."""
        under_way = [at for at in self.saved[tier] if at > max(self.complete[tier], default=-1)]
        if under_way:
            self.complete[tier].append(min(under_way))
            done = self.ledger.with_snapshot_completed if tier == "memory" else self.ledger.with_persist_completed
            self.ledger = done(min(under_way))

    def versions(self, key, upto, only_newest):
        """By iteration, the complete states of an expert that there are."""
        found = {}
        for tier, states in self.saved.items():
            here = {at: states[at][key] for at in self.complete[tier] if at <= upto and key in states[at]}
            found |= dict(sorted(here.items())[-1:]) if only_newest else here
        return found

    def recover(self, at, choice, others):
        """Goes on from a snapshot, with each expert in the state of the iteration that ``choice`` names."""
        restored = {layer: {} for layer in LAYERS}
        for (layer, expert), iteration in choice.items():
            states = self.versions((layer, expert), at, only_newest=False) | {0: {}}
            self.live[layer, expert] = dict(states[iteration])
            restored[layer][expert] = iteration
        self.ledger = self.ledgers[at].after_recovery(restored, others)
        del self.seen[at + 1 :]
        for tier, states in self.saved.items():
            self.complete[tier] = [i for i in self.complete[tier] if i <= at]
            self.saved[tier] = {i: states[i] for i in self.complete[tier]}
        self.ledgers = {i: ledger for i, ledger in self.ledgers.items() if i <= at}

    def lost(self):
        """By layer and expert, the tokens of this time line that its live state has not seen."""

        def missed(layer, expert):
            return sum(c[layer][expert] for i, c in enumerate(self.seen) if c and i not in self.live[layer, expert])

        return {layer: tuple(missed(layer, expert) for expert in range(n)) for layer, n in LAYERS.items()}


def lived(draw, only_newest):
    """A world after some of everything."""
    world = World()
    for what in draw(st.lists(st.sampled_from(["step", "step", "begin", "memory", "storage", "fault"]), max_size=40)):
        at = sorted(set(world.complete["memory"]) | set(world.complete["storage"]))
        if what == "step":
            world.step(draw(st.integers(0, 9)))
        elif what == "begin" and world.ledger.iteration not in world.ledgers and world.ledger.iteration:
            to_memory = chosen(draw, EXPERTS)
            keys = [(layer, e) for layer, numbers in to_memory.items() for e in numbers]
            world.begin(to_memory, chosen(draw, keys) if draw(st.booleans()) else None)
        elif what in world.saved:
            world.finish(what)
        elif what == "fault" and at:
            where = at[-1] if only_newest else draw(st.sampled_from(at))
            choice = {
                key: draw(st.sampled_from(sorted(world.versions(key, where, only_newest) or {0: None})))
                for key in EXPERTS
            }
            world.recover(where, choice, () if only_newest else list(world.ledgers.values()))
    return world


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_lost_tokens_are_those_unseen_by_live_state(data):
    world = lived(data.draw, only_newest=False)
    assert world.ledger.lost == world.lost()
    assert world.ledger.iteration == len(world.seen) - 1
    total = {layer: sum(sum(c[layer]) for c in world.seen[1:]) for layer in LAYERS}
    assert {layer: sum(row) for layer, row in world.ledger.load.items()} == total
    assert dict(zip(LAYERS, world.ledger.routed, strict=True)) == total


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_ledger_tracks_newest_versions_of_both_tiers(data):
    world = lived(data.draw, only_newest=True)
    assert world.ledger.lost == world.lost()
    for unsaved in (world.ledger.since_snapshot, world.ledger.since_persist):
        assert all(tokens >= 0 for row in unsaved.values() for tokens in row)


def test_recovered_snapshot_counts_as_complete():
    stored = TokenLedger.empty({0: 2}).after_iteration({0: [1, 2]}).with_snapshot({0: [0]}, {0: [0]})
    assert stored.since_snapshot == stored.since_persist == {0: (1, 2)}
    again = stored.after_recovery({0: {1: 0}})
    assert again.since_snapshot == again.since_persist == {0: (0, 0)} and not again.to_memory and not again.to_storage
    later = again.after_iteration({0: [1, 2]}).with_snapshot({0: [1]}).after_recovery({0: {0: 1}})
    assert later.lost == {0: (1, 2)}


def test_unusable_version_is_dropped():
    """The memory with the newer one is lost: the expert comes from storage."""
    ledger = (
        TokenLedger.empty({0: 1})
        .after_iteration({0: [1]})
        .with_snapshot({0: [0]}, {0: [0]})
        .with_snapshot_completed(1)
        .with_persist_completed(1)
    )
    ledger = (
        ledger.after_iteration({0: [10]})
        .with_snapshot({0: [0]})
        .with_snapshot_completed(2)
        .after_iteration({0: [100]})
        .with_snapshot(None)
    )
    recovered = ledger.after_recovery({0: {0: 1}})
    assert recovered.lost == {0: (110,)} and recovered.since_snapshot == {0: (0,)}
    assert recovered.after_iteration({0: [1000]}).since_snapshot == {0: (1000,)}
    with raises("ledger-incomplete"):
        recovered.after_recovery({0: {0: 2}})


def test_storage_may_lag_behind_stored_ledger():
    ledger = (
        TokenLedger.empty({0: 1}).after_iteration({0: [1]}).with_snapshot({0: [0]}, {0: [0]}).with_snapshot_completed(1)
    )
    ledger = (
        ledger.after_iteration({0: [10]})
        .with_snapshot({0: [0]})
        .with_snapshot_completed(2)
        .after_iteration({0: [100]})
        .with_snapshot(None)
    )
    assert [[save.iteration for save in tier] for tier in (ledger.to_storage, ledger.to_memory)] == [[1], []]
    assert ledger.after_recovery({0: {0: 1}}).lost == {0: (110,)}
    assert ledger.after_recovery({}).since_persist == {0: (111,)}  # nobody knows whether it ever arrived


def test_snapshot_may_contain_no_expert():
    ledger = (
        TokenLedger.empty({0: 1})
        .after_iteration({0: [1]})
        .with_snapshot({}, {})
        .with_snapshot_completed(1)
        .with_persist_completed(1)
    )
    assert ledger.since_snapshot == ledger.since_persist == {0: (1,)} and not ledger.to_memory


def test_unsaved_tokens_are_counted_per_tier():
    ledger = (
        TokenLedger.empty({0: 2})
        .after_iteration({0: [3, 4]})
        .with_snapshot({0: [0, 1]}, {0: [1]})
        .after_iteration({0: [10, 20]})
    )
    assert ledger.since_snapshot == ledger.since_persist == {0: (13, 24)}
    # complete only later, and counted from when it was begun
    assert ledger.with_snapshot_completed(1).since_snapshot == {0: (10, 20)}
    assert ledger.with_snapshot_completed(1).since_persist == {0: (13, 24)}
    assert ledger.with_persist_completed(1).since_persist == {0: (13, 20)}
    assert ledger.with_snapshot_completed(1).load == {0: (13, 24)}


def test_overtaken_snapshot_never_counts():
    ledger = (
        TokenLedger.empty({0: 2})
        .after_iteration({0: [3, 4]})
        .with_snapshot({0: [0]})
        .after_iteration({0: [1, 1]})
        .with_snapshot({0: [1]})
        .with_snapshot_completed(2)
    )
    assert ledger.since_snapshot == {0: (4, 0)}
    with raises("ledger-incomplete", "1"):
        ledger.with_snapshot_completed(1)


def test_two_faults_with_one_stale_state_lose_each_token_once():
    """Expert 0 is saved after iteration 1 and not again; faults send the run back to 3, and then to 5."""
    at = {1: TokenLedger.empty({0: 2}).after_iteration({0: [1, 1]}).with_snapshot({0: [0, 1]})}
    live = at[1].with_snapshot_completed(1)
    for iteration in (2, 3):
        live = live.after_iteration({0: [10**iteration, 1]})
    at[3] = live.with_snapshot({0: [1]})
    live = at[3].after_recovery({0: {0: 1}})
    assert live.lost == {0: (1100, 0)}
    assert at[3].after_recovery({0: {0: 1}}) == live  # a fault while it recovers
    for iteration in (4, 5):
        live = live.after_iteration({0: [10**iteration, 1]})
    at[5] = live.with_snapshot({0: [1]})
    assert at[5].after_recovery({0: {0: 1}}).lost == {0: (111100, 0)}
    assert at[5].after_recovery({}).lost == {0: (1100, 0)}  # everybody replays: nothing more is lost
    # the node whose memory held a newer state comes back: the time line with the older one is given up
    assert at[3].after_recovery({0: {0: 0, 1: 0}}).lost == {0: (1101, 3)}


def test_plt_matches_equation_7():
    """Two layers: 6 of 60 tokens and 5 of 100 are lost."""
    ledger = TokenLedger.empty({2: 2, 7: 2}).after_iteration({2: [25, 25], 7: [50, 45]})
    ledger = (
        ledger.with_snapshot({2: [0, 1], 7: [0, 1]}).with_snapshot_completed(1).after_iteration({2: [6, 4], 7: [0, 5]})
    )
    ledger = ledger.after_recovery({2: {0: 1}, 7: {1: 1}})
    assert ledger.plt_by_layer() == {2: 6 / 60, 7: 5 / 100}
    assert ledger.plt() == pytest.approx(0.075, rel=1e-12)
    assert ledger.plt({2: 600, 7: 1000}) == pytest.approx(0.0075, rel=1e-12)
    assert TokenLedger.empty({2: 2}).plt() == TokenLedger.empty({}).plt() == 0


def test_dropped_tokens_count_as_routed():
    ledger = TokenLedger.empty({0: 2}).after_iteration({0: [3, 4]}, sent={0: 10})
    assert ledger.routed == (10,) and ledger.load == {0: (3, 4)}


def test_counts_are_exact_beyond_floats():
    ledger = TokenLedger.empty({0: 1})
    for _ in range(3):
        ledger = ledger.after_iteration({0: [2**60 + 1]})
    assert ledger.load == {0: (3 * (2**60 + 1),)}


@each_row("wrong", [{0: [1]}, {0: [1, -1]}, {}, {0: [1, 1], 1: [1]}], ids=str)
def test_mismatched_counts_are_refused(wrong):
    with raises("counts-misfit"):
        TokenLedger.empty({0: 2}).after_iteration(wrong)


def test_impossible_versions_are_refused():
    ledger = TokenLedger.empty({0: 1}).after_iteration({0: [1]}).after_iteration({0: [1]})
    with raises("ledger-incomplete", "iteration 3"):
        ledger.after_recovery({0: {0: 3}})
    with raises("ledger-incomplete", "iteration 1"):
        ledger.after_recovery({0: {0: 1}})
    with raises("counts-misfit", "layer 5"):
        ledger.after_recovery({5: {0: 1}})


@each_row("broken", [{}, {"iteration": 1}, TokenLedger.empty({0: 2}).state_dict() | {"routed": [1, 2]}], ids=str)
def test_invalid_saved_state_is_refused(broken):
    with raises("saved-state-invalid"):
        TokenLedger.from_state(broken)
