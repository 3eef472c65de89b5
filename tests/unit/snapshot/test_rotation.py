"""Which buffer may be written to: all that can happen to a small job, and random runs of a larger one."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.snapshot.rotation import Rotation, Slot, Use
from tests.unit.snapshot import rotation_model as model
from tests.unit.snapshot.rotation_model import Setting, Violation

TWO_NODES = ((0,), (1,))
SETTINGS = {
    "memory": Setting(),
    "memory, after an earlier job": Setting(recovered=True),
    "memory of two nodes": Setting(nodes=TWO_NODES),
    "memory of two nodes, after an earlier job": Setting(nodes=TWO_NODES, recovered=True),
    "memory, and some to storage": Setting(stores=True),
    "disk": Setting(memory=False, slots=2),
    "peers": Setting(nodes=TWO_NODES, peers=True),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_there_is_always_a_whole_snapshot(name):
    setting = SETTINGS[name]
    states = model.explore(setting)
    assert len(states) > 1000, "the model explores too little to say anything"
    assert any(state.begun for state in states)
    assert all(any(rank.at == where for state in states for rank in state.ranks) for where in ("vote", "act"))
    waiting = [s for s in states if all(rank.waiting and rank.at == "vote" for rank in s.ranks)]
    assert waiting and all(model.takes_what_is_due(state, setting) for state in waiting)


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
        return next((number for number, slot in enumerate(self.slots) if slot.use is Use.FREE), None)


class NeverRetires(Rotation):
    """Keeps all that was ever complete."""

    def voted(self):
        return self


NOT_WHOLE, NOT_STORED = "no published snapshot is whole", "storage gets what is not whole"
BROKEN = {
    "a buffer is free before the newer snapshot is published": (Setting(machine=WithoutRetiring), NOT_WHOLE),
    "the buffer to recover from is written over": (
        Setting(machine=ReusesRecovery),
        "what is published is written over",
    ),
    "what storage still reads is written over": (Setting(machine=ForgetsWriting, stores=True), NOT_STORED),
    "the same without a memory tier": (Setting(machine=ForgetsWriting, memory=False, slots=2), NOT_STORED),
    "the update does not wait for copies": (Setting(waits=False), NOT_WHOLE),
    "a node gives up what the others need": (Setting(nodes=TWO_NODES, removes_at_once=True), NOT_WHOLE),
    "older ones are given up before all have their copies": (
        Setting(nodes=TWO_NODES, peers=True, impatient=True),
        NOT_WHOLE,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_model_finds_what_is_wrong(name):
    setting, found = BROKEN[name]
    with pytest.raises(Violation, match=found):
        model.explore(setting)


def test_the_model_finds_who_waits_forever():
    setting = Setting(machine=NeverRetires)
    waiting = [s for s in model.explore(setting) if all(rank.waiting and rank.at == "vote" for rank in s.ranks)]
    assert not all(model.takes_what_is_due(state, setting) for state in waiting)


FOUR = st.sampled_from([((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0,), (1, 2, 3)), ((0,), (1,), (2,), (3,))])


@settings(max_examples=40, deadline=None)
@given(FOUR, st.booleans(), st.booleans(), st.booleans(), st.randoms(use_true_random=False))
def test_random_runs_of_four_ranks(nodes, memory, stores, recovered, random):
    setting = Setting(nodes, memory, stores and memory, recovered and memory, slots=3 if memory else 2)
    state = setting.begin()
    for _ in range(250):
        model.check(state, setting)
        after = [new for _, new in model.following(state, setting)]
        if not after:
            assert all(rank.at == "ended" for rank in state.ranks)
            return
        state = random.choice(after)


def test_buffers_are_taken_in_order_and_given_back():
    rotation = Rotation.of(3, keep=True)
    assert (rotation.free(), rotation.recovery, rotation.persisting) == (0, None, False)
    rotation = rotation.begin(10, persisting=False).complete(10).begin(20, persisting=False)
    assert (rotation.holding(10), rotation.holding(20), rotation.free(), rotation.recovery) == (0, 1, 2, 10)
    rotation = rotation.complete(20)
    assert [slot.use for slot in rotation.slots] == [Use.RETIRING, Use.RECOVERY, Use.FREE]
    assert rotation.recovery == 20
    assert rotation.voted().free() == 0
    with pytest.raises(KeyError):
        rotation.voted().holding(10)


def test_what_goes_to_storage_is_kept_until_it_is_there():
    rotation = Rotation.of(1, keep=False).begin(10, persisting=True).complete(10)
    assert rotation.slots == (Slot(Use.FREE, 10, persisting=True),)
    assert rotation.free() is None and rotation.persisting
    assert rotation.persisted(10).free() == 0

    rotation = Rotation.of(2, keep=True).begin(10, persisting=False).complete(10).persist(10)
    rotation = rotation.begin(20, persisting=False).complete(20).voted()
    assert rotation.free() is None
    assert rotation.persisted(10).free() == 0


def test_what_an_earlier_job_left_in_memory_counts():
    assert Rotation.of(3, keep=True, recovered=7).slots == (Slot(Use.RECOVERY, 7), Slot(), Slot())
    assert Rotation.of(3, keep=False, recovered=7).free() == 0
