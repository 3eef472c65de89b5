"""What the machine can do: 4 workers at once copy, write and read their shares of the same bytes, and nothing else."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.save_peers.rounds import gather, write_result

BLOCK = 8 << 20  # bytes given to one call


def main() -> int:
    """Measures, and writes bytes per second of the whole job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, required=True, help="of all workers together")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", type=Path, required=True, help="an empty directory to write in")
    parser.add_argument("--result", type=Path, required=True, help="JSON file to write")
    own, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    share = own.bytes // dist.get_world_size()
    path = own.directory / f"share_{dist.get_rank()}"
    rates = {name: [] for name in ("memcpy", "write", "read_cold", "read_warm")}
    source, target = torch.ones(share, dtype=torch.uint8), torch.zeros(share, dtype=torch.uint8)
    for _ in range(own.repeats):
        rates["memcpy"].append(rate(own.bytes, lambda: target.copy_(source)))
        rates["write"].append(rate(own.bytes, lambda: write(path, source)))
        forget(path)
        rates["read_cold"].append(rate(own.bytes, lambda: read(path, target)))
        rates["read_warm"].append(rate(own.bytes, lambda: read(path, target)))
        path.unlink()
    medians = {f"{name}_bytes_per_s": statistics.median(values) for name, values in rates.items()}
    write_result(own.result, {"bytes": own.bytes, **medians, "samples": rates})
    return 0


def rate(size: int, work: Callable[[], object]) -> float:
    """Bytes per second, from when all workers are ready until the last is done."""
    dist.barrier()
    start = time.perf_counter()
    work()
    spans = gather((start, time.perf_counter()))
    return size / (max(end for _, end in spans) - min(start for start, _ in spans))


def write(path: Path, source: torch.Tensor) -> None:
    """Writes as ``dd bs=8M conv=fsync`` does."""
    view = memoryview(source.numpy())
    with open(path, "wb", buffering=0) as file:
        start = 0
        while start < len(view):
            start += file.write(view[start : start + BLOCK])
        os.fsync(file.fileno())


def read(path: Path, target: torch.Tensor) -> None:
    """Reads a file from its beginning to its end."""
    view = memoryview(target.numpy())
    with open(path, "rb", buffering=0) as file:
        start = 0
        while start < len(view):
            start += file.readinto(view[start : start + BLOCK])


def forget(path: Path) -> None:
    """Takes a file that is on disk out of the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
