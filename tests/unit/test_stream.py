"""When the stream of a device waits for other workers, and for how long; the host has gone on meanwhile."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch

from moc.runtime.device import HostCopy
from moc.runtime.progress import Progress
from moc.stream import StreamSpans, marker_of
from tests.unit.streams import Mark, Stream


def test_stream_wait_is_measured_from_its_operation():
    stream = Stream()
    waits = StreamSpans(stream.mark)
    for _ in range(2):
        with waits.span():
            pass
    assert not waits.under_way and waits.take() == 0.0  # it still computes
    stream.reach(10.0)
    assert waits.under_way and waits.take() == 0.0
    stream.reach(12.0)
    assert not waits.under_way and waits.take() == 2.0
    stream.reach(15.0, 15.5)
    assert not waits.under_way and waits.take() == 0.5 and waits.take() == 0.0


def test_span_of_waiting_host_starts_when_stream_is_idle():
    stream = Stream()
    waits = StreamSpans(stream.mark)
    with waits.span():
        assert not waits.under_way
        stream.reach(1.0)
        assert waits.under_way
    assert waits.under_way  # the second mark is behind
    stream.reach(4.0)
    assert waits.take() == 3.0


def test_waits_on_broken_device_end():
    def broken():
        raise RuntimeError("CUDA error")

    waits = StreamSpans(broken)
    with waits.span():
        pass
    assert not waits.under_way and waits.take() == 0.0


def test_stream_wait_is_reported_and_not_counted(monkeypatch):
    now, stream, progress = [100.0], Stream(), Progress()
    monkeypatch.setattr("moc.runtime.progress.time.monotonic", lambda: now[0])
    monkeypatch.setattr("moc.stream.marker_of", lambda device: stream.mark)
    progress.use_stream_of("cuda")
    progress.enter("step")
    with progress.waiting(on_stream=True):
        pass
    now[0] += 5.0
    assert not progress.report()["waits"] and progress.report()["since"] == 5.0  # its kernels compute
    stream.reach(105.0)
    now[0] += 70.0
    assert progress.report()["waits"]
    stream.reach(175.0)
    assert not progress.report()["waits"] and progress.report()["since"] == 5.0
    progress.enter("step")
    assert progress.report()["since"] == 0.0 and progress.report()["longest"] == {"step": 75.0}


def test_finished_host_wait_does_not_count(monkeypatch):
    now, progress = [0.0], Progress()
    monkeypatch.setattr("moc.runtime.progress.time.monotonic", lambda: now[0])
    progress.enter("step")
    with progress.waiting():
        now[0] += 300.0
        assert progress.report()["waits"] and progress.report()["since"] == 300.0
    assert progress.report() == dict(section="step", since=0.0, waits=False, longest={}, iteration=None)
    progress.enter("save")
    now[0] += 2.0
    assert progress.report()["since"] == 2.0


def test_waits_can_be_read_concurrently():
    waits = StreamSpans(lambda: Mark(0.0))

    def use(number: int) -> float:
        with waits.span():
            return waits.take() + waits.under_way

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(use, range(200))) >= 0.0
    waits.take()
    assert not waits.under_way


class OfDevice:
    """Event of CUDA, and what selects a device for a thread: first device 0, where a query creates a context."""

    current, contexts = threading.local(), set()

    def __init__(self, enable_timing=False):
        pass

    def record(self):
        pass

    def query(self):
        self.contexts.add(getattr(self.current, "device", 0))
        return True

    synchronize = query

    def elapsed_time(self, end_event):
        return 1e3 * (self.query() and end_event.query())

    @classmethod
    @contextlib.contextmanager
    def selected(cls, device):
        cls.current.device = device.index
        yield
        del cls.current.device


def test_queries_from_other_threads_create_no_other_context(monkeypatch):
    device, host = torch.device("cuda", 3), mock.Mock()
    monkeypatch.setattr(torch.cuda, "Event", OfDevice)
    monkeypatch.setattr(torch.cuda, "device", OfDevice.selected)
    monkeypatch.setattr(torch, "empty", lambda *size, **options: host)
    waits, copied = StreamSpans(marker_of(device)), HostCopy(mock.Mock(device=device))
    with waits.span():
        pass
    with ThreadPoolExecutor(1) as thread:  # as one that reports whether this worker waits, or finalizes a snapshot
        assert thread.submit(lambda: (waits.under_way, waits.take())).result() == (False, 1.0)
        assert thread.submit(copied.wait_unchecked).result() is host
    assert OfDevice.contexts == {3} and host.copy_.call_args.kwargs == {"non_blocking": True}
