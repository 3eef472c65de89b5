"""Copies in bubbles: what they have time for is held up until one, and nothing for ever."""

import pytest
import torch

from moc.snapshot import device_copy as module
from moc.snapshot.device_copy import PIECE, BubbleGate, Copy, GateSplit, StreamBubbles, ThreadCapturer, split_of
from tests.cases import each_row
from tests.unit.snapshot.test_capture import until
from tests.unit.streams import Stream


class Clock:
    """Stands still but where it is told to go on."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def iterate(bubbles: BubbleGate, clock: Clock, *waits: float) -> float:
    """An iteration with waits of the given seconds, the last of them at the vote; what it tells."""
    with bubbles.computing():
        for seconds in waits[:-1]:
            clock.now += 100.0
            with bubbles.waiting():
                clock.now += seconds
    clock.now += 100.0
    with bubbles.waiting():
        clock.now += waits[-1]
    return bubbles.take()


@each_row(
    ("amount", "fitting", "split"),
    [
        (1000, None, GateSplit(bytes_while_closed=1000, piece=PIECE)),  # nothing is known
        (1 << 30, 0.0, GateSplit(bytes_while_closed=1 << 30, piece=64 << 10)),  # there are no bubbles
        (
            1 << 30,
            float(1 << 28),
            GateSplit(bytes_while_closed=3 << 28, piece=1 << 20),
        ),  # a quarter fits, in 256 pieces
        (1 << 28, float(1 << 28), GateSplit(bytes_while_closed=0, piece=1 << 20)),
        (1 << 20, float(1 << 40), GateSplit(bytes_while_closed=0, piece=PIECE)),  # all fits
    ],
)
def test_algorithm_4_splits_copies_by_bubble_time(amount, fitting, split):
    assert split_of(amount, fitting) == split


def test_waits_count_as_bubbles_and_computation_does_not(clock):
    bubbles = BubbleGate()
    assert iterate(bubbles, clock, 1.0, 2.0, 0.5) == 3.5
    with bubbles.computing(), bubbles.waiting():
        clock.now += 9.0  # cut off, or a replay
    assert iterate(bubbles, clock, 1.0, 1.0) == 2.0


def test_gate_is_open_except_during_computation():
    bubbles = BubbleGate()
    with bubbles.waiting():
        assert bubbles.is_open
    assert bubbles.is_open  # the vote is no reason to close it
    with bubbles.computing():
        assert not bubbles.is_open
        with bubbles.waiting(), bubbles.waiting():
            assert bubbles.is_open
        assert not bubbles.is_open
        with pytest.raises(ConnectionError), bubbles.waiting():
            raise ConnectionError  # the other stage is lost
        assert not bubbles.is_open
    assert bubbles.is_open
    with pytest.raises(ConnectionError), bubbles.computing(), bubbles.waiting():
        raise ConnectionError
    assert bubbles.is_open


def test_device_gate_closes_only_while_stream_computes():
    stream = Stream()
    bubbles = StreamBubbles(stream.mark)
    with bubbles.computing():
        assert bubbles.is_open  # the device has not begun
        stream.reach(1.0)
        assert not bubbles.is_open
        with bubbles.waiting():
            assert not bubbles.is_open  # the host waits for its own kernels, such as with batch_p2p_sync
    assert not bubbles.is_open  # the host is done, and the device is not
    stream.reach(3.0)
    assert bubbles.is_open and bubbles.waits
    stream.reach(5.0)
    assert not bubbles.is_open and not bubbles.waits
    stream.reach(9.0)
    assert bubbles.is_open and not bubbles.waits
    with bubbles.waiting():
        stream.reach(10.0)
        assert bubbles.waits
    stream.reach(10.5)
    assert bubbles.take() == 2.5


def test_device_copies_pass_when_stream_reaches_wait():
    stream, copies = Stream(), [Copy(torch.ones(6), torch.zeros(6))]
    bubbles = StreamBubbles(stream.mark)
    bubbles.copied(10**9, 1.0)
    bubbles._seconds.append(1.0)
    with bubbles.computing():
        stream.reach(1.0)
        capture = ThreadCapturer(bubbles).start(copies)
        with bubbles.waiting():
            pass
    assert not capture._done.done()
    stream.reach(2.0)
    capture.wait(opens=False)
    assert capture.bubble_bytes == 24 and copies[0].target.all()


def test_interrupted_iteration_on_device_leaves_gate_open():
    stream = Stream()
    bubbles = StreamBubbles(stream.mark)
    with pytest.raises(ConnectionError), bubbles.computing(), bubbles.waiting():
        stream.reach(1.0)
        raise ConnectionError
    assert bubbles.is_open and bubbles.take() == 0.0


def test_copies_that_exceed_bubbles_pass_during_computation(clock, monkeypatch):
    monkeypatch.setattr(module, "_LEAST_PIECE", 4)
    bubbles, copies = BubbleGate(), [Copy(torch.ones(100), torch.zeros(100))]
    capturer = ThreadCapturer(bubbles)
    for seconds in (500.0, 2.0, 2.0, 3.0, 2.0):
        iterate(bubbles, clock, seconds)
    with bubbles.computing():
        first = capturer.start(copies)  # its rate is unknown
        first.wait(opens=False)
    assert copies[0].target.all() and first.bubble_bytes == 0
    bubbles._rates.clear()
    bubbles.copied(80, 1.0)
    copies[0].target.zero_()
    with bubbles.computing():
        second = capturer.start(copies)
        until(lambda: copies[0].target.sum() == 60)  # of 400 bytes, 160 fit
        assert not second._done.done()
        with bubbles.waiting():
            second.wait(opens=False)
    assert copies[0].target.all() and second.bubble_bytes == 160


def test_bytes_copied_in_waits_are_counted():
    bubbles, copies = BubbleGate(), [Copy(torch.ones(6), torch.zeros(6))]
    capture = ThreadCapturer(bubbles).start(copies)
    capture.wait()
    assert capture.bubble_bytes == 0  # between iterations, or when the update is due
    with bubbles.waiting():
        capture = ThreadCapturer(bubbles).start(copies)
        capture.wait()
    assert capture.bubble_bytes == 24 and ThreadCapturer().start(copies).bubble_bytes == 0
