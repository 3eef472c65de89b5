"""Threads that nobody need wait for."""

import subprocess
import sys
import threading

import pytest

from moc.background import Background, background, within


def test_one_thing_after_the_other_and_what_is_cancelled_is_not_done():
    thread, goes_on, done = Background("test"), threading.Event(), []
    first = thread.submit(goes_on.wait)
    second, third = thread.submit(done.append, 2), thread.submit(done.append, 3)
    assert second.cancel() and not first.done()
    goes_on.set()
    third.result()
    assert done == [3]
    thread.end()


def test_what_is_raised_is_raised_where_it_is_asked_for():
    failed = Background("test").submit(int, "x")
    with pytest.raises(ValueError, match="invalid literal"):
        failed.result()


def test_a_process_has_one_of_a_name():
    assert background("test-a") is background("test-a") is not background("test-b")


def test_a_process_ends_although_a_call_hangs():
    program = "import time; from moc.background import background; background('x').submit(time.sleep, 3600)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_what_does_not_return_soon_is_left():
    assert within(60.0, int, "7") == within(None, int, "7") == 7
    goes_on = threading.Event()
    assert within(0.01, goes_on.wait) is None
    goes_on.set()
    with pytest.raises(ValueError, match="invalid literal"):
        within(60.0, int, "x")

    def times_out():
        raise TimeoutError("its-own")

    with pytest.raises(TimeoutError, match="its-own"):
        within(60.0, times_out)
