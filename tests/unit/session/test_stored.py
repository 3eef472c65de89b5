"""What goes to storage: whole windows, first the full snapshot that partial ones need, and what a failure leaves."""

from types import SimpleNamespace

from moc.policy import Capability, SnapshotPlan, StorageSchedule
from moc.session.resume.point import ResumePoint
from moc.session.saving.storage import StorageHealth, StorageTier
from moc.state.operators import Detail
from moc.state.record import Position
from tests.cases import each_row
from tests.model_shape import ModelShape, model_operators


class Policy:
    """One whose snapshots may be partial; storage needs a full one first."""

    name, requires = "test", frozenset({Capability.OLDER_EXPERTS})
    operators = model_operators(ModelShape((1,), 8, 16, 8, 8, 4, 100, num_experts=2, expert_ffn_hidden_size=16))

    def __init__(self, based=True):
        self.based, self.asked, self.anew = based, 0, 0
        self.told, self.given = [], None
        self.storage, self.schedule = Storage(self), SimpleNamespace(restart_window=self.restart_window)

    def plan(self, iteration, load=None):
        return self.given

    def restart_window(self):
        self.anew += 1


class Storage(StorageSchedule):
    policy: Policy

    def plan(self, iteration, load=None, is_overdue=False):
        return plan(iteration) if self.policy.given or is_overdue else None

    def needs(self, plan):
        return plan.complete and not self.policy.based

    def on_write_ended(self, plan, committed):
        self.policy.told.append((plan.iteration, committed))

    def on_full_snapshot_lost(self):
        self.policy.asked += 1


def plan(iteration, complete=True, since=None):
    operators = {one.name: Detail.FULL for one in Policy.operators if complete or one.expert != 0}
    return SnapshotPlan(iteration, "test", operators, complete, since)


def stored(every=5, has_memory_tier=True, policy=None):
    log = SimpleNamespace(message=lambda _: None, events=SimpleNamespace(write=lambda *_, **__: None))
    health = StorageHealth("there", every, 100, None, log)
    health.receive(health.contribution())
    return StorageTier(policy or Policy(), health, ResumePoint(Position()), has_memory_tier)


def test_every_snapshot_goes_to_storage_without_memory_tier():
    policy = Policy()
    there = stored(None, has_memory_tier=False, policy=policy)
    assert there.part_of(plan(3), has_room=False) == plan(3)
    assert there.plan(3, None, has_room=False) == (None, None)  # none is due
    policy.given = plan(3)
    assert there.plan(3, None, has_room=False) == (plan(3), plan(3))


def test_snapshot_without_memory_stays_due_until_storage():
    policy = Policy()
    there = stored(None, has_memory_tier=False, policy=policy)
    assert not there.defer(plan(3))
    there.health.closed, policy.given = True, plan(3)
    assert there.plan(3, None, has_room=True) == (None, None)
    there.on_skipped_iteration(3, None)
    assert there.defer(plan(3))
    there.health.closed, policy.given = False, None
    assert there.plan(4, None, has_room=True) == (plan(4), plan(4))  # that of iteration 3 was due


def test_window_reaches_storage_completely_or_not_at_all():
    there = stored(every=5)

    def part_of(plan, has_room):
        storage = there.part_of(plan, has_room)
        there.on_start(plan, storage)
        return storage

    assert part_of(plan(4, since=4), True) is None  # none is due yet
    assert part_of(plan(5, since=4), True) is None  # its window has begun without
    assert part_of(plan(6, since=6), False) is None  # all buffers are in use
    assert part_of(plan(8, since=8), True) == plan(8, since=8)
    assert part_of(plan(9, since=8), False) == plan(9, since=8)


def test_policy_plans_for_storage_only_due_snapshots():
    policy = Policy()
    policy.given = plan(4, complete=False)
    there = stored(every=5, policy=policy)
    assert there.plan(4, None, True) == (policy.given, None)  # none is due yet
    policy.given = plan(5, complete=False)
    assert there.plan(5, None, False) == (policy.given, None)  # storage is busy
    policy.given = plan(7, complete=False)
    assert there.plan(7, None, True) == (plan(7), plan(7))  # it stays due until storage takes it
    assert there.plan(7, None, True) == (plan(7), plan(7))  # asking changes nothing
    there.on_start(plan(7), plan(7))
    policy.given = plan(8, complete=False)
    assert there.plan(8, None, True) == (policy.given, None)


def test_due_snapshot_is_taken_when_storage_works_again():
    policy = Policy()
    there = stored(None, has_memory_tier=False, policy=policy)
    there.on_start(plan(4), plan(4))
    there.on_failure(plan(4), plan(4), in_memory=True)
    there.health.receive({"storage_rests": 1.0, "storage_closed": 0.0})
    assert there.plan(5, None, True) == (None, None)
    there.health.receive({"storage_rests": 0.0, "storage_closed": 0.0})
    assert there.plan(6, None, True) == (plan(6), plan(6))  # no interval is due
    there.on_start(plan(6), plan(6))
    assert there.plan(7, None, True) == (None, None)
    there.health.receive({"storage_rests": 1.0, "storage_closed": 0.0})
    policy.given = plan(8)
    there.on_skipped_iteration(8, None)
    policy.given = None
    there.health.receive({"storage_rests": 0.0, "storage_closed": 0.0})
    assert there.plan(9, None, True) == (plan(9), plan(9))


def test_policy_is_notified_of_committed_snapshots():
    policy = Policy()
    there = stored(policy=policy)
    there.on_committed(plan(5))
    there.on_failure(plan(6), plan(6), in_memory=True)
    assert policy.told == [(5, True), (6, False)]


def test_storage_is_complete_with_newest_snapshot():
    there = stored()
    assert there.has(0)
    there.on_start(plan(4), plan(4))
    there.on_committed(plan(4))
    for complete in (False, True):
        there.on_start(plan(5, complete), plan(5, complete))
        there.on_committed(plan(5, complete))
        assert there.newest == 5 and there.has(5) == complete


@each_row("has_memory_tier", [True, False])
def test_failure_without_memory_starts_new_window(has_memory_tier):
    policy = Policy()
    there, lost = stored(5 if has_memory_tier else None, has_memory_tier, policy), plan(6, False, since=5)
    there.on_start(lost, lost)
    there.problem = "no room"
    there.on_failure(lost, lost, in_memory=True)
    assert there.is_window_incomplete(plan(7, since=5)) and not there.is_window_incomplete(plan(8))
    assert policy.anew == (not has_memory_tier)
    assert there.newest is None and there.problem == "no room"
    there.on_committed(plan(8))
    assert there.newest == 8 and not there.problem


def test_partial_snapshots_need_one_full_snapshot():
    policy = Policy()
    there = stored(policy=policy)
    there.on_failure(plan(5), plan(5), in_memory=True)
    there.request_base(5)
    assert policy.asked == 0  # storage rests after its failure
    there.on_committed(plan(7, complete=False))
    assert there.newest is None
    for _ in range(2):
        there.request_base(7)
    assert policy.asked == 1
    assert there.part_of(plan(8, complete=False), True) is None  # partial ones wait for it
    assert there.part_of(plan(9), True) == plan(9)
    there.on_start(plan(9), plan(9))
    there.on_committed(plan(9))
    assert there.newest == 9
