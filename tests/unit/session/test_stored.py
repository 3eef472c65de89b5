"""What goes to storage: whole windows, first the full snapshot that partial ones need, and what a failure leaves."""

from types import SimpleNamespace

import pytest

from moc.policy import SnapshotPlan
from moc.session.queues import Taken
from moc.session.resume.point import ResumePoint
from moc.session.storage_health import StorageHealth
from moc.session.stored import Stored
from moc.state.detail import Detail
from moc.state.record import Position


class Policy:
    """One whose snapshots may be partial; storage needs a full one first."""

    exact = False

    def __init__(self, based=True):
        self.based, self.asked, self.anew = based, 0, 0

    def everything(self, iteration):
        return plan(iteration)

    def stores(self, plan):
        return plan.complete and not self.based

    def for_storage(self, plan):
        return plan

    def storage_lost(self):
        self.asked += 1

    def begin_anew(self):
        self.anew += 1


def plan(iteration, complete=True, since=None):
    return SnapshotPlan(iteration, "test", {"output": Detail.FULL}, complete, since)


def taken(plan, in_memory=True):
    return Taken(plan, plan, {}, SimpleNamespace(in_memory=in_memory))


def stored(every=5, beside=True, policy=None):
    log = SimpleNamespace(message=lambda _: None, events=SimpleNamespace(write=lambda *_, **__: None))
    health = StorageHealth("there", every, 100, None, log)
    health.on_vote(health.ballot())
    return Stored(policy or Policy(), health, ResumePoint(Position()), beside)


def test_without_memory_every_snapshot_goes_to_storage():
    assert stored(None, beside=False).part_of(plan(3), has_room=False) == plan(3)


def test_beside_memory_a_window_goes_there_from_its_first_snapshot_on_or_not_at_all():
    there = stored(every=5)
    assert there.part_of(plan(4, since=4), True) is None  # none is due yet
    assert there.part_of(plan(5, since=4), True) is None  # its window has begun without
    assert there.part_of(plan(6, since=6), False) is None  # all buffers are in use
    assert there.part_of(plan(8, since=8), True) == plan(8, since=8)
    assert there.part_of(plan(9, since=8), False) == plan(9, since=8)


def test_storage_has_everything_once_the_newest_snapshot_is_there_and_complete():
    there = stored()
    assert there.has(0)
    for complete in (False, True):
        there.begins(plan(5, complete))
        there.published(taken(plan(5, complete)))
        assert there.newest == 5 and there.has(5) == complete


@pytest.mark.parametrize("beside", [True, False])
def test_a_failure_breaks_the_window_and_without_memory_begins_another_one(beside):
    policy = Policy()
    there, lost = stored(5 if beside else None, beside, policy), plan(6, False, since=5)
    there.begins(lost)
    there.problem = "no room"
    there.failed(taken(lost))
    assert there.is_broken(plan(7, since=5)) and not there.is_broken(plan(8))
    assert policy.anew == (not beside)
    assert there.newest is None and there.problem == "no room"
    there.published(taken(plan(8)))
    assert there.newest == 8 and not there.problem


def test_partial_snapshots_count_only_on_top_of_a_full_one_which_is_asked_for_once():
    policy = Policy()
    there = stored(policy=policy)
    there.published(taken(plan(2)))
    there.failed(taken(plan(5)))
    there.ask_for_base(5)
    assert policy.asked == 0  # storage rests after its failure
    there.published(taken(plan(7, complete=False)))
    assert there.newest == 2
    for _ in range(2):
        there.ask_for_base(7)
    assert policy.asked == 1
    assert there.part_of(plan(8, complete=False), True) is None  # partial ones wait for it
    assert there.part_of(plan(9), True) == plan(9)
    there.published(taken(plan(9)))
    assert there.newest == 9
