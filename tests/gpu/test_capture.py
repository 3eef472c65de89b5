"""Capture on a GPU: a thread and a stream of its own, piece by piece into pinned memory."""

import torch

from moc.snapshot.device_copy import Copy, capturer, coalesced
from moc.store.buffers import HostBuffer

MIB = 1 << 20


def cuda():
    return torch.device("cuda", torch.cuda.current_device())


def test_changes_after_wait_are_not_captured(tmp_path):
    source = torch.arange(16 * MIB, dtype=torch.float32, device=cuda())
    held, buffer = source.cpu(), HostBuffer(4 * source.numel(), tmp_path / "buffer", pin=True)
    half = source.numel() // 2
    halves = ((0, half), (half, source.numel()))
    joined = list(coalesced((source[a:b] for a, b in halves), ((4 * a, 4 * b) for a, b in halves)))
    copies = [Copy(part, buffer.view(start, stop, torch.float32)) for part, start, stop in joined]
    assert len(copies) == 1
    capture = capturer(cuda()).start(copies)
    capture.wait()
    source.fill_(-1)
    torch.cuda.synchronize()
    assert torch.equal(buffer.view(0, buffer.nbytes, torch.float32), held)
    assert capture.seconds > 0
    buffer.close()


def test_earlier_device_work_is_waited_for():
    source, buffer = torch.ones(2048, 2048, device=cuda()), HostBuffer(4 * 2048 * 2048, pin=True)
    product = torch.zeros_like(source)
    torch.cuda.synchronize()
    for _ in range(20):  # still computing when the copy is asked for
        torch.mm(source, source, out=product)
    product.fill_(7)
    capturer(cuda()).start([Copy(product.view(-1), buffer.view(0, buffer.nbytes, torch.float32))]).wait()
    assert buffer.view(0, buffer.nbytes, torch.float32).unique().tolist() == [7]
    buffer.close()


def test_captures_run_in_start_order():
    buffer, capturing = HostBuffer(MIB, pin=True), capturer(cuda())
    sources = [torch.full((MIB,), value, dtype=torch.uint8, device=cuda()) for value in range(10)]
    captures = [capturing.start([Copy(source, buffer.values)]) for source in sources]
    captures[-1].wait()
    assert buffer.values.unique().tolist() == [9]
    buffer.close()


def test_pinned_buffer_can_be_recreated_after_closing():
    for _ in range(3):
        buffer = HostBuffer(MIB, pin=True)
        assert buffer.values.is_pinned()
        buffer.close()
