"""Upstream logs on CUDA: a stream of its own copies what is sent, whose memory may be given away at once."""

import torch

from moc.logs.crossings import Crossing, Direction
from moc.logs.files import LogReader
from moc.logs.writer import LogWriter

SHAPE = (1024, 2, 2048)


def test_what_was_sent_is_logged_although_its_memory_is_used_again(tmp_path):
    crossings = [Crossing(Direction.FORWARD, 0, i) for i in range(8)]
    device = torch.device("cuda", torch.cuda.current_device())
    writer = LogWriter(tmp_path, crossings, SHAPE, torch.bfloat16, limit=1e9, device=device)
    for iteration in range(1, 4):
        writer.begin(iteration)
        for crossing in crossings:
            value = 8 * iteration + crossing.micro_batch
            sent = torch.full(SHAPE, float(value), dtype=torch.bfloat16, device=device)
            writer.write(crossing, sent)
            del sent
            torch.full(SHAPE, -1.0, dtype=torch.bfloat16, device=device)  # where the allocator thinks it fits
        writer.end()
    writer.wait()
    reader = LogReader(tmp_path)
    for iteration in range(1, 4):
        for crossing in crossings:
            assert (reader.read(iteration, crossing) == 8 * iteration + crossing.micro_batch).all()
    writer.close()
