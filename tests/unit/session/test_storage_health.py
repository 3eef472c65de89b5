"""When snapshots go to storage beside memory, and what is said when it will not do."""

import threading
from concurrent.futures import Future

from moc.background import Background
from moc.errors import codes_in
from moc.events import EventLog
from moc.session.saving.storage import Lag, StorageHealth, tolerable_error
from moc.store.errors import CheckpointError, TakenError
from tests.cases import each_row


class Log:
    """What a run tells."""

    def __init__(self):
        self.said, self.told = [], []
        self.message = self.said.append
        self.events = EventLog(None)
        self.events.write = lambda kind, **fields: self.told.append((kind, fields))


def storage(log: Log, prepare=None, **changes) -> StorageHealth:
    told = dict(name="disk", every=10, late_after=10, newest=None, log=log, prepare=prepare)
    return StorageHealth(**told | changes)


def failed_with(error: BaseException) -> Future:
    done = Future()
    done.set_exception(error)
    return done


def test_slow_write_is_reported_once_and_skips_are_counted():
    log = Log()
    disk = storage(log)
    assert not disk.is_due(9) and disk.is_due(10)
    disk.on_start(12)
    assert not disk.is_due(19) and disk.is_due(20)
    for iteration in range(12, 45):
        disk.on_iteration(iteration, pending=12)
    assert [fields["iteration"] for kind, fields in log.told if kind == "save_skipped"] == [22, 32, 42]
    assert codes_in("\n".join(log.said)) == ["storage-slow"] and "iteration 12" in log.said[0]
    assert disk.late and disk.gauges == {"saves_skipped": 3.0}
    disk.on_stored(12)
    assert not disk.late and disk.newest == 12 and len(log.said) == 2 and not codes_in(log.said[1])
    disk.on_iteration(60, pending=None)
    assert disk.skipped == 3


@each_row("window", [1, 2, 4])
def test_window_written_at_once_is_not_slow(window):
    log = Log()
    disk = storage(log, every=1, late_after=1, commit_delay=lambda: window - 1 + 3)
    for iteration in range(1, 60):
        disk.on_iteration(iteration, pending=iteration - (iteration % window) - 3)
    assert log.said == [] and log.told == []


def test_intermittently_slow_storage_is_reported_once_a_minute():
    log = Log()
    disk = storage(log, every=2, late_after=2)
    for iteration in range(10, 60, 5):
        disk.on_iteration(iteration, pending=iteration - 4)
        disk.on_stored(iteration - 4)
    assert [codes_in(line) for line in log.said] == [["storage-slow"], []]
    assert sum(kind == "save_skipped" for kind, _ in log.told) == 10


def test_failed_write_is_reported_once_retried_and_counted():
    log = Log()
    disk = storage(log, newest=7)
    disk.on_start(20)
    disk.on_failure(20, "no room")
    assert disk.is_suspended and disk.is_due(21)  # as soon as it may
    disk.on_failure(21, "no room")
    assert [fields["failures"] for kind, fields in log.told] == [1, 2]
    assert len(log.said) == 1 and "no room" in log.said[0] and "iteration 7" in log.said[0]
    disk.receive({"storage_rests": 0.0, "storage_closed": 0.0})
    disk.on_stored(22)
    assert not disk.is_suspended and len(log.said) == 2


def test_nothing_is_written_before_storage_is_ready():
    thread, ready, log = Background("test"), threading.Event(), Log()
    disk = storage(log, prepare=lambda: thread.submit(ready.wait))
    assert disk.closed and disk.contribution()["storage_closed"] == 1.0
    disk.receive({"storage_rests": 0.0, "storage_closed": 1.0})  # as another worker hears it
    assert disk.closed
    ready.set()
    while disk.contribution()["storage_closed"]:
        disk.wait()
    assert disk.problem() is None and not log.said


def test_failed_preparation_is_retried_unless_owned():
    log, tries = Log(), [failed_with(OSError(28, "full")), Future()]
    tries[1].set_result(None)
    disk = storage(log, prepare=lambda: tries.pop(0))
    assert disk.contribution()["storage_closed"] == 1.0 and codes_in("\n".join(log.said)) == ["disk-full"]
    assert disk.contribution()["storage_closed"] == 0.0 and disk.problem() is None
    taken = storage(log, prepare=lambda: failed_with(TakenError("taken")))
    assert taken.problem() == "taken [directory-in-use]" and taken.contribution()["storage_closed"] == 1.0


@each_row(
    "error, is_tolerable",
    [(OSError(28, "full"), True), (CheckpointError("lacks"), True), (TakenError("taken"), False), (KeyError(1), False)],
)
def test_user_errors_and_other_jobs_are_not_tolerated(error, is_tolerable):
    assert (tolerable_error(failed_with(error)) is not None) == is_tolerable


def test_pending_or_successful_write_is_no_failure():
    well = Future()
    assert tolerable_error(well) is None
    well.set_result(None)
    assert tolerable_error(well) is None


def test_missing_state_is_a_metric_and_one_warning():
    log = Log()
    disk = storage(log)
    disk.on_lag(None)
    assert disk.gauges == {} and not log.said
    disk.on_lag(Lag(age=9, overdue=0, operators=40, oldest=0))
    assert disk.gauges == {"storage_age": 9.0, "storage_overdue": 0.0} and not log.said
    for age in range(30, 60):
        disk.on_lag(Lag(age, overdue=3, operators=40, oldest=age))
    assert disk.gauges == {"storage_age": 59.0, "storage_overdue": 3.0}
    assert len(log.said) == 1 and "3 of 40 operators" in log.said[0] and "30 iterations" in log.said[0]
    disk.on_lag(Lag(age=9, overdue=0, operators=40, oldest=0))
    assert len(log.said) == 2
    disk.on_lag(Lag(age=31, overdue=3, operators=40, oldest=31))
    assert len(log.said) == 2  # within a minute of the first warning


def test_unresponsive_storage_is_closed_and_reported_once(monkeypatch):
    monkeypatch.setattr("moc.session.saving.storage.LOOKING_S", 0.0)
    log, answers = Log(), Future()
    disk = storage(log, prepare=lambda: answers)
    for _ in range(2):
        disk.receive(disk.contribution())
    assert disk.closed and codes_in("\n".join(log.said)) == ["storage-silent"]
    answers.set_result(None)
    disk.receive(disk.contribution())
    assert not disk.closed and len(log.said) == 1
