"""Which buffer may be written to: all that can happen to a small job, and random runs of a larger one."""

from dataclasses import replace
from functools import cache
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.snapshot.buffer_pool import Rotation, Slot, Use
from tests.cases import each_row
from tests.unit.snapshot import rotation_model as model
from tests.unit.snapshot.rotation_model import Setting, Violation

TWO_NODES = ((0,), (1,))
SETTINGS = {
    "memory": Setting(),
    "memory, after an earlier job": Setting(recovered=True),
    "memory of two nodes": Setting(nodes=TWO_NODES),
    "memory of two nodes, after an earlier job": Setting(nodes=TWO_NODES, recovered=True),
    "memory, and some to storage": (HANGS := Setting(stores=True, fails=True)),
    "memory, where experts are carried": Setting(nodes=TWO_NODES, carries=True),
    "memory, where experts are carried, and some to storage": Setting(stores=True, carries=True),
    "disk": Setting(memory=False),
    "peers": Setting(nodes=TWO_NODES, peers=True),
    "windows": Setting(window=2, recovered=True),
    "a disk that fails": Setting(memory=False, fails=True),
}


explore = cache(model.explore)  # twice of the same


LARGE = ("memory, and some to storage", "memory, where experts are carried, and some to storage")
ROWS = [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE)) for name in SETTINGS]


@pytest.mark.parametrize("name", ROWS)
def test_valid_snapshot_always_exists(name):
    setting = SETTINGS[name]
    states = explore(setting)
    assert len(states) > 1000, "the model explores too little to say anything"
    assert any(state.begun for state in states)
    assert all(any(rank.at == where for state in states for rank in state.ranks) for where in ("vote", "act"))
    waiting = [s for s in states if all(rank.waiting and rank.at == "vote" for rank in s.ranks)]
    assert waiting and all(model.takes_what_is_due(state, setting) for state in waiting)


@pytest.mark.slow
def test_hanging_storage_only_increases_snapshot_age():
    """Whenever it stops, snapshots that become due are taken, in no more buffers than were promised."""
    waiting = [s for s in explore(HANGS) if any(rank.waiting and rank.writing for rank in s.ranks)]
    assert waiting and all(model.takes_what_is_due(state, HANGS, frozen=True) for state in waiting)


def test_model_detects_wait_for_storage():
    setting, chance = Setting(stores=True, waits_for_storage=True), Random(1)
    state = setting.begin()
    while model.takes_what_is_due(state, setting, frozen=True):  # as long as the test may take
        state = chance.choice([new for _, new in model.following(state, setting)] or [setting.begin()])


@settings(max_examples=15, deadline=None)
@given(st.booleans(), st.booleans(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_random_runs_with_peers_and_windows_keep_invariants(peers, stores, window, random):
    setting = Setting(TWO_NODES, stores=stores, window=window, peers=peers, spare=2 + peers, fails=stores)
    state = setting.begin()
    for _ in range(200):
        assert model.takes_what_is_due(state, setting, frozen=True)
        after = [new for _, new in model.following(state, setting)]
        if not after:
            return
        state = random.choice(after)


class WithoutRetiring(Rotation):
    """Gives the older snapshot up as soon as the newer one is complete."""

    def complete(self, iteration):
        after = super().complete(iteration)
        return after._each(lambda slot: replace(slot, use=Use.FREE) if slot.use is Use.RETIRING else slot)


class ReusesRecovery(Rotation):
    """Takes the buffer to recover from rather than wait."""

    def free(self):
        number = super().free()
        recovery = (number for number, slot in enumerate(self.slots) if slot.use is Use.RECOVERY)
        return next(recovery, None) if number is None else number


class ForgetsWriting(Rotation):
    """Takes a buffer that is still being written to storage."""

    def free(self):
        writing = (number for number, slot in enumerate(self.slots) if slot.use is Use.FREE and slot.persisting)
        return next(writing, super().free())


class NeverRetires(Rotation):
    """Keeps all that was ever complete."""

    def begin(self, iteration, persisting, supersedes):
        return super().begin(iteration, persisting, None)


class ForgetsWindows(Rotation):
    """Gives up all that is older than what is complete, window or not."""

    def begin(self, iteration, persisting, supersedes):
        return super().begin(iteration, persisting, iteration)


class CountsRetiringOnce(Rotation):
    """Takes a buffer too many when one vote completes two snapshots."""

    def complete(self, iteration):
        after = super().complete(iteration)
        return after._each(lambda slot: replace(slot, superseded_by=None))


class NeverComplete(Rotation):
    """Does not hear that all have copied a snapshot."""

    def complete(self, iteration):
        return self


CARRIES = dict(nodes=TWO_NODES, carries=True)
NOT_CARRIED = "what is to be carried is (given up|written over)"
NOT_WHOLE, NOT_STORED = "no published snapshot is whole", "storage gets what is not whole"
BROKEN = {
    "a buffer is free before the newer snapshot is published": (
        Setting(machine=WithoutRetiring),
        "what is published is written over",
    ),
    "what retires in one vote counts as one": (
        Setting(machine=CountsRetiringOnce),
        "more buffers than are ever needed",
    ),
    "the buffer to recover from is written over": (Setting(machine=ReusesRecovery), NOT_WHOLE),
    "what storage still reads is written over": (Setting(machine=ForgetsWriting, stores=True), NOT_STORED),
    "the same without a memory tier": (Setting(machine=ForgetsWriting, memory=False), NOT_STORED),
    "a window is broken up": (Setting(machine=ForgetsWindows, window=2), NOT_WHOLE),
    "nothing is ever given up": (Setting(machine=NeverRetires), "more buffers than are ever needed"),
    "the update does not wait for copies": (Setting(waits=False), NOT_WHOLE),
    "experts are carried when a snapshot counts already": (Setting(**CARRIES, carries_late=True), NOT_CARRIED),
    "a node gives up what the others need": (Setting(nodes=TWO_NODES, removes_at_once=True), NOT_WHOLE),
    "older ones are given up before all have their copies": (
        Setting(nodes=TWO_NODES, peers=True, impatient=True),
        NOT_WHOLE,
    ),
}


@each_row("name", BROKEN)
def test_model_detects_violations(name):
    setting, found = BROKEN[name]
    with pytest.raises(Violation, match=found):
        model.explore(setting)


def test_model_detects_infinite_wait():
    setting = Setting(machine=NeverComplete)
    waiting = [s for s in model.explore(setting) if all(rank.waiting and rank.at == "vote" for rank in s.ranks)]
    assert not all(model.takes_what_is_due(state, setting) for state in waiting)


FOUR = st.sampled_from([((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0,), (1, 2, 3)), ((0,), (1,), (2,), (3,))])


@settings(max_examples=40, deadline=None)
@given(FOUR, st.booleans(), st.booleans(), st.booleans(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_random_runs_of_four_ranks_keep_invariants(nodes, memory, stores, recovered, window, random):
    setting = Setting(nodes, memory, stores and memory, recovered and memory, window if memory else 1)
    state = setting.begin()
    for _ in range(250):
        model.check(state, setting)
        after = [new for _, new in model.following(state, setting)]
        if not after:
            assert all(rank.at == "ended" for rank in state.ranks)
            return
        state = random.choice(after)


def test_buffers_are_taken_in_order_and_released():
    rotation = Rotation.of(2, keep=True)
    assert (rotation.free(), rotation.recovery, rotation.persisting) == (0, None, False)
    rotation = rotation.begin(10, False, 10).complete(10).begin(20, False, 20)
    assert (rotation.holding(10), rotation.holding(20), rotation.free(), rotation.recovery) == (0, 1, 2, 10)
    rotation = rotation.complete(20)
    assert [slot.use for slot in rotation.slots] == [Use.RETIRING, Use.RECOVERY]
    assert (rotation.free(), rotation.recovery) == (2, 20)
    assert rotation.committed().free() == 0 and rotation.committed().all_free() == (0,)
    with pytest.raises(KeyError):
        rotation.committed().holding(10)


@each_row("spare", [2, 3])
def test_one_commit_completes_window_and_starts_next(spare):
    rotation, newest = Rotation.of(spare, keep=True, stores=False), 0
    for iteration in range(1, 6):
        rotation = rotation.begin(iteration, False, iteration - 2 if iteration == 3 else None)
        rotation, newest = rotation.complete(iteration).committed(), iteration
    begun = range(newest + 1, newest + 1 + spare)  # the end of the second window, and what follows
    for iteration in begun:
        rotation = rotation.begin(iteration, False, 4 if iteration == 6 else None).committed()
    assert len(rotation.slots) == rotation.max_buffers(3, 5)
    rotation = rotation.complete(6).complete(7)
    while rotation.free() is not None:
        rotation = rotation.begin(newest + 10 + len(rotation.slots), False, None)
    assert len(rotation.slots) == rotation.max_buffers(3, 5)
    assert rotation.committed().free() == 0


def test_buffer_is_kept_until_storage_has_it():
    rotation = Rotation.of(1, keep=False).begin(10, True, 10).complete(10)
    assert rotation.slots == (Slot(Use.FREE, 10, persisting=True, supersedes=10),)
    assert rotation.free() is None and rotation.persisting
    assert rotation.persisted(10).free() == 0

    rotation = Rotation.of(1, keep=True).begin(10, False, 10).complete(10).persist(10)
    rotation = rotation.begin(20, False, 20).complete(20).committed()
    assert rotation.free() is None
    assert rotation.persisted(10).free() == 0


def test_recovered_snapshots_occupy_buffers():
    rotation = Rotation.of(2, keep=True, recovered=[7, 8])
    assert rotation.slots == (Slot(Use.RECOVERY, 7, supersedes=7), Slot(Use.RECOVERY, 8, supersedes=8))
    assert (rotation.free(), rotation.recovery, rotation.holds(8), rotation.holds(9)) == (2, 8, True, False)
    assert Rotation.of(2, keep=False, recovered=[7]).free() == 0


def uses(rotation: Rotation) -> dict[int, Use]:
    return {slot.iteration: slot.use for slot in rotation.slots if not slot.free}


def test_window_is_kept_until_next_window_is_complete():
    rotation = Rotation.of(2, keep=True)
    for iteration, supersedes in ((1, 1), (2, None), (3, None), (4, 2), (5, None)):
        rotation = rotation.begin(iteration, False, supersedes)
        assert Use.RETIRING not in uses(rotation).values()
        rotation = rotation.complete(iteration)
        assert (uses(rotation)[min(uses(rotation))] is Use.RETIRING) == (iteration == 4)
        rotation = rotation.committed()
    assert uses(rotation) == dict.fromkeys((2, 3, 4, 5), Use.RECOVERY)
    everything = rotation.begin(6, False, 6).complete(6).committed()
    assert uses(everything) == {6: Use.RECOVERY} and len(everything.slots) == 5


def test_one_commit_can_complete_two_snapshots():
    rotation = Rotation.of(2, keep=True).begin(9, False, 9).committed().complete(9).committed()
    rotation = rotation.begin(10, False, 10).committed().begin(11, False, 11)
    rotation = rotation.committed().complete(10).complete(11)
    assert len(rotation.slots) == rotation.max_buffers(1, 1) and rotation.free() is None
    assert rotation.committed().free() == 0


@each_row("number", [2, 3, 4, 5])
def test_free_buffers_are_trimmed_to_required_number(number):
    rotation = Rotation((Slot(),) * number, spare=2, keep=False)
    assert len(rotation.trimmed(rotation.max_buffers(1, 1)).slots) == 2


def test_buffers_unused_by_shorter_windows_are_trimmed():
    rotation = Rotation.of(2, keep=True)
    assert (
        Rotation.of(2, keep=True, stores=False).max_buffers(4, 7) == rotation.max_buffers(4, 7) - 3
    )  # storage holds no window
    for iteration in range(1, 5):
        rotation = rotation.begin(iteration, False, 1 if iteration == 4 else None).complete(iteration).committed()
    rotation = rotation.begin(5, False, 5).complete(5).committed()
    assert len(rotation.slots) == 5 and rotation.trimmed(9).slots == rotation.slots
    assert rotation.trimmed(5) == rotation.trimmed(3)  # what is needed stays
    rotation = rotation.begin(6, False, 6).complete(6).committed()
    assert len(rotation.trimmed(3).slots) == 3 and rotation.trimmed(3).free() == 1


def test_retaken_snapshot_supersedes_only_itself():
    """The window of iterations 5 to 7 needs the snapshots of 5 and 6 from before the recovery."""
    rotation = Rotation.of(3, keep=True, recovered=[2, 3, 4, 5, 6])
    taken = rotation.begin(6, persisting=False, supersedes=None)
    assert taken.holding(6) == 5
    complete = taken.complete(6)
    assert complete.holding(6) == 5 and complete.committed().all_free() == (4,)
    assert complete.committed().in_use() == {2, 3, 4, 5, 6}
    window = complete.committed().begin(7, persisting=False, supersedes=5).complete(7).committed()
    assert window.in_use() == {5, 6, 7}
