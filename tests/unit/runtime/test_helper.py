"""Processes that work for a worker answer, or are told to have died: nobody waits for ever."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from moc.runtime.helper import Helper, HelperError

MODULE = "tests.unit.runtime.helping"


@pytest.fixture
def helper():
    one = Helper(MODULE)
    one.start()
    yield one
    one.close()


def test_it_answers_one_call_after_the_other_however_long(helper):
    (pid,) = helper.processes
    assert helper.ask({}) == pid
    for size in (1 << 20, 0, 5):
        assert helper.ask({"size": size, "given": "y" * size}) == "x" * size


def test_it_tells_when_it_has_started(helper):
    while not helper.has_started():
        time.sleep(0.001)
    assert helper.ask({"size": 3}) == "xxx" and helper.has_started()


@pytest.mark.parametrize("given", ["", "y" * (1 << 20)], ids=["short", "longer than the pipe"])
def test_one_that_does_not_answer_is_killed(helper, given):
    helper.ask({})
    (pid,) = helper.processes
    psutil.Process(pid).suspend()
    helper.patience_s = 0.1
    with pytest.raises(HelperError, match=r"has not answered for 0.1 s"):
        helper.ask({"given": given})
    assert helper.processes == [] and not psutil.pid_exists(pid)


def test_one_that_dies_is_told_and_started_again_when_asked_for(helper):
    with pytest.raises(HelperError, match="has died"):
        helper.ask({"dies": True})
    with pytest.raises(HelperError, match="has died"):
        helper.ask({"given": "y" * (1 << 20)})
    assert helper.processes == []
    assert helper.start() and not helper.start()
    assert helper.ask({}) == helper.processes[0]


def test_one_that_dies_before_it_has_started_is_told():
    helper = Helper(MODULE, {"HELPING_DIES": "1"})
    for ask in (lambda: helper.ask({}), lambda: [helper.has_started() for _ in range(10**9)]):
        helper.start()
        with pytest.raises(HelperError, match="has died"):
            ask()
    helper.close()


def test_one_that_cannot_be_started_is_told(monkeypatch):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(HelperError, match="cannot be started: .*nowhere"):
        Helper(MODULE).start()


def test_whoever_waits_is_told_of_the_end(helper):
    helper.ask({})
    with ThreadPoolExecutor(1) as beside:
        asked = beside.submit(helper.ask, {"waits_s": 600})
        time.sleep(0.1)
        helper.close()
        with pytest.raises(HelperError, match="has died"):
            asked.result(timeout=60)
    with pytest.raises(HelperError, match="has been ended"):
        helper.start()


def test_it_ends_with_the_thread_that_has_started_it():
    helper, answered, may_end = Helper(MODULE), threading.Event(), threading.Event()
    one = threading.Thread(target=lambda: (helper.start(), helper.ask({}), answered.set(), may_end.wait()))
    one.start()
    answered.wait()
    (pid,) = helper.processes
    may_end.set()
    one.join()
    assert psutil.Process(pid).wait(timeout=60) in (None, -signal.SIGKILL)
    helper.close()
