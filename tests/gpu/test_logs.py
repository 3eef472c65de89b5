"""Upstream logs on CUDA: a stream of its own copies what is sent, whose memory may be given away at once."""

import torch

from moc.logs.log import LogEntry, LogReader, LogWriter

SHAPE = (1024, 2, 2048)


def test_log_keeps_sent_tensor_after_memory_reuse(tmp_path):
    entries = [LogEntry(f"micro batch {i}", SHAPE, torch.bfloat16) for i in range(8)]
    device = torch.device("cuda", torch.cuda.current_device())
    writer = LogWriter(tmp_path, entries, 1e9, device, name="log", limit_remedy="raise it", alternative="do without")
    for iteration in range(1, 4):
        writer.begin(iteration)
        for number, entry in enumerate(entries):
            value = 8 * iteration + number
            sent = torch.full(SHAPE, float(value), dtype=torch.bfloat16, device=device)
            writer.write(entry.key, sent)
            del sent
            torch.full(SHAPE, -1.0, dtype=torch.bfloat16, device=device)  # where the allocator thinks it fits
        writer.end()
    writer.wait()
    reader = LogReader(tmp_path)
    for iteration in range(1, 4):
        for number, entry in enumerate(entries):
            assert (reader.read(iteration, entry.key) == 8 * iteration + number).all()
    writer.close()
