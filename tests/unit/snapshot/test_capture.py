"""Copies beside the computation: what the sources held is what arrives."""

import threading
import time

import pytest
import torch

from moc.snapshot.capture import ThreadCapturer, capturer
from moc.snapshot.copies import Copy


def test_the_processor_has_a_thread():
    assert isinstance(capturer(torch.device("cpu")), ThreadCapturer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_what_changes_after_waiting_does_not_arrive(dtype):
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


def test_parameters_that_want_gradients_are_read_without_a_graph():
    source, target = torch.nn.Parameter(torch.ones(3)), torch.zeros(3)
    ThreadCapturer().start([Copy(source, target)]).wait()
    assert target.tolist() == [1, 1, 1] and not target.requires_grad


def test_captures_run_in_the_order_in_which_they_were_started():
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


def test_who_waits_hears_of_an_error():
    capture = ThreadCapturer().start([Copy(torch.ones(3), torch.zeros(2))])
    with pytest.raises(RuntimeError, match="size"):
        capture.wait()
