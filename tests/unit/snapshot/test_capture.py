"""Copies beside the computation: what the sources held is what arrives."""

import contextlib
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from moc.snapshot import device_copy as module
from moc.snapshot.device_copy import Both, Copy, FromDevice, Gate, ThreadCapturer, capturer, nbytes
from tests.cases import each_row


def test_cpu_capturer_is_thread():
    assert isinstance(capturer(torch.device("cpu")), ThreadCapturer)


@each_row("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_changes_after_wait_are_not_captured(dtype):
    sources = [torch.arange(n).to(dtype) for n in (1, 1000, 100_000)]
    held = [source.clone() for source in sources]
    targets = [torch.zeros_like(source) for source in sources]
    begun = time.perf_counter()
    capture = capturer(torch.device("cpu")).start(list(map(Copy, sources, targets)))
    capture.wait()
    passed = time.perf_counter() - begun
    for source in sources:
        source.fill_(-1)
    assert all(map(torch.equal, targets, held))
    capture.wait()
    assert 0 < capture.seconds <= passed
    assert all(map(torch.equal, targets, held))


def test_device_and_host_copies_use_separate_capturers():
    taken = []

    class Device(ThreadCapturer):
        def start(self, copies):
            taken.extend(copies)
            return super().start([])

    on_device, target = Copy(torch.empty(3, device="meta"), torch.zeros(3)), torch.zeros(3)
    both = Both(Device(), ThreadCapturer())
    for copies in ([Copy(torch.ones(3), target), on_device], [on_device]):
        both.start(copies).wait()
    both.close()
    assert taken == [on_device, on_device] and target.tolist() == [1, 1, 1]


def test_parameters_are_captured_without_autograd_graph():
    source, target = torch.nn.Parameter(torch.ones(3)), torch.zeros(3)
    ThreadCapturer().start([Copy(source, target)]).wait()
    assert target.tolist() == [1, 1, 1] and not target.requires_grad


def test_captures_run_in_start_order():
    source, target, last = torch.zeros(50_000), torch.zeros(50_000), None
    copies = capturer(torch.device("cpu"))
    for value in range(20):
        last = copies.start([Copy(torch.full_like(source, value), target)])
    last.wait()
    assert torch.equal(target, torch.full_like(target, 19))


def test_any_thread_may_wait():
    target = torch.zeros(1000)
    capture = ThreadCapturer().start([Copy(torch.ones(1000), target)])
    threads = [threading.Thread(target=capture.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.sum() == 1000


def test_waiting_thread_receives_error():
    capture = ThreadCapturer().start([Copy(torch.ones(3), torch.zeros(2))])
    with pytest.raises(RuntimeError, match="size"):
        capture.wait()


def test_device_copies_without_gate_are_refused():
    with pytest.raises(ValueError, match="pass a gate"):
        ThreadCapturer(copier=FromDevice(torch.device("cuda", 0), lambda: None))


@pytest.fixture
def by_thread(monkeypatch):
    """The copies of each thread, of one element each; each takes a while, until all threads have had their turn."""
    monkeypatch.setattr(module, "HOST_PIECE", 4)
    copy, made = module._copy_all, {}

    def noted(copies, **how):
        time.sleep(0.002)
        made.setdefault(threading.current_thread(), []).extend(copies)
        copy(copies, **how)

    monkeypatch.setattr(module, "_copy_all", noted)
    return made


def ones(count: int) -> list[Copy]:
    return [Copy(torch.ones(1), torch.zeros(1)) for _ in range(count)]


def test_wait_that_opens_gate_helps_copying(by_thread):
    copies = ones(50)
    capture = ThreadCapturer().start(copies)
    capture.wait()
    assert all(arrived(copies)) and sum(map(len, by_thread.values())) == 50
    assert len(by_thread) == 2 and threading.current_thread() in by_thread
    assert capture.seconds >= 50 * 0.002  # of both threads: so much would one take


def test_wait_without_opening_gate_makes_no_copies(by_thread):
    copies = ones(20)
    ThreadCapturer().start(copies).wait(opens=False)
    assert all(arrived(copies)) and threading.current_thread() not in by_thread


def test_waiting_start_is_queued_behind_earlier_starts(by_thread):
    capturing, earlier, later = ThreadCapturer(), ones(20), ones(20)
    capturing.start(earlier)
    capturing.start(later).wait()
    assert all(arrived(earlier + later)) and threading.current_thread() not in by_thread


def test_second_waiting_thread_waits_for_piece_of_first(monkeypatch):
    copy, goes_on, other = module._copy_all, threading.Event(), []

    def held_here(copies, **how):
        if threading.current_thread() is threading.main_thread():
            other[0].start()
            assert not goes_on.wait(0.2)  # it waits for this piece
        else:
            until(lambda: other and other[0].is_alive())  # so this thread has one
        copy(copies, **how)

    monkeypatch.setattr(module, "HOST_PIECE", 4)
    monkeypatch.setattr(module, "_copy_all", held_here)
    copies = ones(2)
    capture = ThreadCapturer().start(copies)
    other.append(threading.Thread(target=lambda: capture.wait(opens=False) or goes_on.set()))
    capture.wait()
    other[0].join()
    assert goes_on.is_set() and all(arrived(copies))


def test_all_waiting_threads_receive_error_of_helping_thread(monkeypatch):
    copies = [Copy(torch.ones(3), torch.zeros(2)) for _ in range(8)]
    monkeypatch.setattr(module, "HOST_PIECE", 12)
    capture = ThreadCapturer().start(copies)
    for opens in (True, False):
        with pytest.raises(RuntimeError, match="size"):
            capture.wait(opens)


@pytest.fixture
def small_pieces(monkeypatch):
    """Of one element each."""
    monkeypatch.setattr(module, "PIECE", 4)


def closed_after(gate: Gate, count: int) -> list[Copy]:
    """Six copies; as soon as so many are done, the gate is closed."""

    class Closing(torch.Tensor):
        """Closes the gate when it is copied; a subclass of tensors is asked first."""

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch._foreach_copy_:
                gate.close()
            return super().__torch_function__(func, types, args, kwargs)

    sources = [torch.full((1,), 1.0 + number) for number in range(6)]
    sources[count - 1] = sources[count - 1].as_subclass(Closing)
    return [Copy(source, torch.zeros(1)) for source in sources]


def arrived(copies: list[Copy]) -> list[bool]:
    return [bool(copy.target) for copy in copies]


def until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_closed_gate_blocks_copies_and_open_gate_passes_them(small_pieces):
    gate = Gate()
    gate.close()
    copies = [Copy(torch.ones(6), torch.zeros(6))]
    capture = ThreadCapturer(gate).start(copies)
    following = threading.Thread(target=capture.wait, kwargs=dict(opens=False), daemon=True)
    following.start()
    following.join(0.05)
    assert following.is_alive() and not copies[0].target.any()  # who follows opens nothing
    gate.open()
    following.join(60)
    assert not following.is_alive() and copies[0].target.all()


def test_closing_gate_lets_only_current_piece_pass(small_pieces):
    gate = Gate()
    copies = closed_after(gate, 3)
    capture = ThreadCapturer(gate).start(copies)
    until(lambda: sum(arrived(copies)) == 3)
    time.sleep(0.02)
    assert arrived(copies) == [True] * 3 + [False] * 3
    capture.wait()  # the update is due
    assert all(arrived(copies)) and capture.seconds < 60


def test_closing_capturer_opens_gate(small_pieces):
    gate, copies = Gate(), [Copy(torch.ones(6), torch.zeros(6))]
    gate.close()
    capturing = ThreadCapturer(gate)
    capturing.start(copies)
    until(lambda: capturing._thread._work_queue.empty())  # it has begun
    capturing.close()
    assert copies[0].target.all()


def test_gate_waits_are_not_copy_time(small_pieces, monkeypatch):
    gate, now = Gate(), [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    gate.close()
    capturing = ThreadCapturer(gate)
    capture = capturing.start([Copy(torch.ones(2), torch.zeros(2))])
    until(lambda: capturing._thread._work_queue.empty())  # it has begun
    now[0] = 100.0
    capture.wait()
    assert capture.seconds == 0.0


@pytest.fixture
def cuda(monkeypatch) -> list[tuple]:
    """What is asked of CUDA, in order, and whether the thread that trains asked it; memory is the host's."""
    asked: list[tuple] = []

    def note(*what) -> None:
        asked.append((*what, threading.current_thread() is threading.main_thread()))

    class Event:
        def __init__(self, blocking: bool = False):
            assert blocking  # otherwise a core spins

        def record(self):
            note("record")

        def synchronize(self):
            note("wait")

    copy = module._copy_all
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: note("stream") or object())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: note("device", device))
    monkeypatch.setattr(
        module, "_copy_all", lambda piece, non_blocking: (note("copy", nbytes(piece)), copy(piece, non_blocking))
    )
    return asked


def from_device(gate: Gate, check=lambda: None) -> ThreadCapturer:
    return ThreadCapturer(gate, FromDevice(torch.device("cuda", 1), check))


def test_device_pieces_are_copied_by_separate_thread(cuda):
    """The thread that trains records one event, however many tensors there are; nothing is queued behind a piece."""
    copies = [Copy(torch.ones(3), torch.zeros(3)) for _ in range(4)]  # of 12 bytes
    capturing = from_device(Gate(piece=20))
    capturing.start(copies).wait()
    capturing.close()
    assert all(map(torch.equal, (one.target for one in copies), (one.source for one in copies)))
    mine, others = ([what for *what, trains in cuda if trains is here] for here in (True, False))
    assert mine == [["record"]]
    pieces = [["copy", amount] for amount in (20, 20, 8)]
    assert others == [["device", torch.device("cuda", 1)], ["stream"], ["wait"], *(
        step for piece in pieces for step in (piece, ["record"], ["wait"])
    )]  # fmt: skip


def test_gate_delays_device_copies_between_pieces(cuda):
    gate = Gate(piece=4)
    copies = closed_after(gate, 3)
    capturing = from_device(gate)
    capture = capturing.start(copies)
    until(lambda: sum(arrived(copies)) == 3)
    time.sleep(0.02)
    assert arrived(copies) == [True] * 3 + [False] * 3
    capture.wait()
    assert all(arrived(copies))
    capturing.close()


def test_values_of_aborted_generation_are_not_copied(cuda):
    """Weights whose gathering was cut off: the copies would be taken for whole."""

    def check() -> None:
        raise RuntimeError("aborted")

    copy = Copy(torch.ones(3), torch.zeros(3))
    capturing = from_device(Gate(), check)
    with pytest.raises(RuntimeError, match="aborted"):
        capturing.start([copy]).wait()
    capturing.close()
    assert not copy.target.any()
