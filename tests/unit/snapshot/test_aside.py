"""What works beside training stays off the processor that trains."""

import os
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from moc import background
from moc.background import SWITCH_S, CpuAffinity, share_interpreter

ALL = os.sched_getaffinity(0)
pytestmark = pytest.mark.skipif(len(ALL) < 2, reason="there is no other processor")


@contextmanager
def thread(name):
    over = threading.Event()
    one = threading.Thread(target=over.wait, name=name)
    one.start()
    yield one.native_id
    over.set()
    one.join()


@pytest.fixture
def process():
    one = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield one
    one.kill()
    one.wait()
    one.stdin.close()


@pytest.fixture
def trains_on(monkeypatch):
    return lambda processor: monkeypatch.setattr(background, "_processor", lambda: processor)


def test_snapshot_threads_leave_training_core(trains_on):
    here, there, *_ = sorted(ALL)
    beside = CpuAffinity(workers=1)
    with thread("snapshot-seal_0") as seal, thread("event-log") as log, thread("other") as other:
        trains_on(here)
        beside.move()
        assert os.sched_getaffinity(seal) == ALL - {here} and os.sched_getaffinity(log) == {here}
        trains_on(there)  # the scheduler may move the thread that trains
        beside.move()
        assert os.sched_getaffinity(seal) == ALL - {there}
        assert os.sched_getaffinity(log) == {there}  # for an event, training waits
        assert os.sched_getaffinity(other) == os.sched_getaffinity(0) == ALL


def test_later_thread_is_moved_too(trains_on):
    here = min(ALL)
    trains_on(here)
    beside = CpuAffinity(workers=1)
    beside.move()
    with thread("snapshot-capture_0") as capture:
        beside.move()
        assert os.sched_getaffinity(capture) == ALL - {here}


def test_helper_processes_use_idle_time_of_other_cores(trains_on, process):
    here = min(ALL)
    trains_on(here)
    CpuAffinity(workers=1).move([process.pid])
    assert os.sched_getaffinity(process.pid) == ALL - {here}
    assert os.sched_getscheduler(process.pid) == os.SCHED_IDLE


def test_threads_stay_if_every_processor_trains(process):
    with thread("snapshot-seal_0") as seal:
        CpuAffinity(workers=len(ALL)).move([process.pid])
        assert os.sched_getaffinity(seal) == os.sched_getaffinity(process.pid) == ALL
    assert os.sched_getscheduler(process.pid) == os.SCHED_OTHER


def test_ended_process_is_ignored(process):
    process.kill()
    process.wait()
    CpuAffinity(workers=1).move([process.pid])


def test_processor_is_that_of_calling_thread():
    found = []

    def look():
        os.sched_setaffinity(0, {max(ALL)})  # this thread alone
        found.append(background._processor())

    one = threading.Thread(target=look)
    one.start()
    one.join()
    assert found == [max(ALL)]


def test_share_interpreter_shortens_switch_interval():
    before = sys.getswitchinterval()
    try:
        share_interpreter()
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    finally:
        sys.setswitchinterval(before)
