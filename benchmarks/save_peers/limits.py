"""Measures the machine's limits and ours: 4 concurrent workers copy, write and read shares of the same bytes.

A disk's speed changes from minute to minute, so our code alternates with plain copying, writing and reading.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.save_peers.rounds import forget, gather, write_result
from megatron.pretraining.process import cpu

cpu.install()

from moc.cli_output import Parser  # noqa: E402
from moc.snapshot.contents import Share  # noqa: E402
from moc.snapshot.saver import Saver  # noqa: E402
from moc.state.operators import Region  # noqa: E402
from moc.store.shard_file import FileLayout, ShardReader, TensorBox, read_ahead, read_values  # noqa: E402  # noqa: E402
from moc.store.storage import LocalStorage  # noqa: E402
from moc.store.store import Store, checkpoint_name, shard_file_name  # noqa: E402

BLOCK = 8 << 20  # bytes per call
PIECES = 60  # tensor chunks of a share


def main() -> int:
    """Measures the rates, and writes them in bytes per second over all workers."""
    parser = Parser(description=__doc__)
    parser.add_argument("--bytes", type=int, required=True, help="of all workers together")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", type=Path, required=True, help="an empty directory to write in")
    parser.add_argument("--result", type=Path, required=True, help="JSON file to write")
    own, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    share = own.bytes // dist.get_world_size()
    path = own.directory / f"share_{dist.get_rank()}"
    rates = {name: [] for name in ("memcpy", "write", "read_cold", "read_warm", "capture", "persist", "load")}
    source, target = torch.ones(share, dtype=torch.uint8), torch.zeros(share, dtype=torch.uint8)
    ours = Ours(own.directory, source, target)
    for number in range(own.repeats):
        rates["memcpy"].append(rate(own.bytes, lambda: target.copy_(source)))
        rates["write"].append(rate(own.bytes, lambda: write(path, source)))
        forget(path)
        rates["read_cold"].append(rate(own.bytes, lambda: read(path, target)))
        rates["read_warm"].append(rate(own.bytes, lambda: read(path, target)))
        path.unlink()
        rates["capture"].append(rate(own.bytes, lambda number=number: ours.capture(number)))
        rates["persist"].append(rate(own.bytes, ours.persist))
        forget(ours.path)
        rates["load"].append(rate(own.bytes, ours.load))
        ours.remove()
    medians = {f"{name}_bytes_per_s": statistics.median(values) for name, values in rates.items()}
    write_result(own.result, {"bytes": own.bytes, **medians, "samples": rates})
    return 0


class Ours:
    """One worker's share of a snapshot of ``source``, saved and loaded by the classes that training uses."""

    def __init__(self, directory: Path, source: torch.Tensor, target: torch.Tensor):
        self._rank, self._store = dist.get_rank(), Store(LocalStorage(directory))
        elements = len(source) // 4 // PIECES
        cut = slice(0, elements * PIECES * 4)
        sources, self._targets = (t[cut].view(torch.float32).split(elements) for t in (source, target))
        names = [f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in range(PIECES)]
        whole = Region((0,), (elements,))
        entries = [TensorBox(name, "master", (elements,), whole, torch.float32) for name in names]
        self._share = Share(FileLayout(entries), sources, {})
        self._fragments: list[Any] = [  # interface of chunks, without a model
            SimpleNamespace(name=e.name, slot=e.slot, region=e.region, global_shape=e.global_shape, view=target)
            for e, target in zip(entries, self._targets, strict=True)
        ]
        self._saver = Saver(self._rank, torch.device("cpu"), None, self._store)
        self._saver.reserve(0, self._share.layout.nbytes)

    @property
    def path(self) -> Path:
        """File of the last snapshot."""
        return Path(
            self._store.storage.display_path(
                f"{checkpoint_name(self._snapshot.iteration)}/{shard_file_name(self._rank)}"
            )
        )

    def capture(self, iteration: int) -> None:
        """Copies the state into the buffer."""
        self._snapshot = self._saver.take(0, iteration, self._share, {})
        self._snapshot.capture.wait()

    def persist(self) -> None:
        """Writes the snapshot, after it is hashed."""
        self._saver.persist(self._snapshot)
        written = self._snapshot.persisted
        assert written is not None  # persist() has started the write
        written.result()

    def load(self) -> None:
        """Reads the snapshot, compares hashes, and fills the state."""
        reader = ShardReader([self.path], verifies=True)
        for fragment in read_ahead(self._fragments, reader):
            fragment.view.copy_(read_values(fragment, reader))

    def remove(self) -> None:
        """Removes the snapshot."""
        dist.barrier()
        if self._rank == 0:
            self._store.remove(self._snapshot.iteration)
        dist.barrier()


def rate(size: int, work: Callable[[], object]) -> float:
    """Returns the bytes per second from the first worker's start to the last worker's end, after a barrier."""
    dist.barrier()
    start = time.perf_counter()
    work()
    spans = gather((start, time.perf_counter()))
    return size / (max(end for _, end in spans) - min(start for start, _ in spans))


def write(path: Path, source: torch.Tensor) -> None:
    """Writes as ``dd bs=8M conv=fsync`` does."""
    values: Any = source.numpy()  # numpy arrays are buffers, but typeshed does not know it
    view = memoryview(values)
    with open(path, "wb", buffering=0) as file:
        start = 0
        while start < len(view):
            start += file.write(view[start : start + BLOCK])
        os.fsync(file.fileno())


def read(path: Path, target: torch.Tensor) -> None:
    """Reads a file from beginning to end."""
    values: Any = target.numpy()
    view = memoryview(values)
    with open(path, "rb", buffering=0) as file:
        start = 0
        while start < len(view):
            start += file.readinto(view[start : start + BLOCK])


if __name__ == "__main__":
    sys.exit(main())
