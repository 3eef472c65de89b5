"""Threads that nobody need wait for."""

import subprocess
import sys
import threading
from concurrent.futures import Future

import pytest

from moc.background import Background, background, within


def test_tasks_run_in_order_and_cancelled_ones_do_not():
    thread, goes_on, done = Background("test"), threading.Event(), []
    first = thread.submit(goes_on.wait)
    second, third = thread.submit(done.append, 2), thread.submit(done.append, 3)
    assert second.cancel() and not first.done()
    goes_on.set()
    third.result()
    assert done == [3]
    thread.end()


def test_background_error_is_raised_by_result():
    failed = Background("test").submit(int, "x")
    with pytest.raises(ValueError, match="invalid literal"):
        failed.result()


def test_background_thread_is_shared_by_name():
    assert background("test-a") is background("test-a") is not background("test-b")


def test_process_ends_despite_hanging_call():
    program = "import time; from moc.background import background; background('x').submit(time.sleep, 3600)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_hanging_call_is_abandoned_after_timeout():
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


def test_result_at_the_end_of_the_timeout_is_not_lost(monkeypatch):
    class Late(Future):
        """A call that ends just after the wait for it."""

        def result(self, timeout=None):
            if timeout is not None:
                self.set_result("result")
                raise TimeoutError
            return super().result()

    monkeypatch.setattr(Background, "submit", lambda *_: Late())
    assert within(1.0, print) == "result"
