"""Measures how snapshot copies slow down a training device, with and without division into pieces.

    python benchmarks/device_copies.py --output docs/results/gpu_copies.json

An "iteration" here is a number of layers.  Each layer multiplies matrices and then waits for a few bytes from the
device, as megatron-core's MoE layers wait for each expert's token count before they dispatch.  During each iteration,
the training code copies a snapshot of the given size, undivided or in pieces, of one tensor or of many.  The program
reports for each case

* the duration of iterations relative to iterations without a copy, and the longest wait of a layer;
* the duration of the copy and of its start, and the numbers of calls and bytes.

The same run measures the limits: the bandwidth of one copy into pinned and into pageable memory, and into pinned
memory during matrix products.

Without a GPU it runs on the CPU with small sizes; only the numbers of calls and bytes are meaningful then.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, show, table, write_json
from moc.snapshot import device_copy
from moc.snapshot.device_copy import Capturer, Copy, FromDevice, FromHost, Gate, ThreadCapturer, nbytes
from moc.store.buffers import HostBuffer

MB = 1 << 20
LAYERS = 24
TENSORS = 3000  # of a snapshot that is not flat: about the number of ZeRO's masters and moments
PIECES = {"whole": 1 << 60, "64 MB": 64 * MB, "16 MB": 16 * MB}
ROUNDS = 5


@dataclass(frozen=True)
class Size:
    """Sizes of the measured cases.

    Attributes:
        amounts: bytes of a snapshot.
        iterations_ms: durations of iterations.
        side: side length of the multiplied matrices.
    """

    amounts: Sequence[int]
    iterations_ms: Sequence[int]
    side: int


ON_GPU = Size((1000 * MB, 2000 * MB, 3000 * MB), (150, 400), 8192)
ON_CPU = Size((48 * MB,), (20,), 128)


class Work:
    """Iterations of a given duration on a device."""

    def __init__(self, device: torch.device, side: int, iteration_ms: float):
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.device, self._factor = device, torch.randn(side, side, device=device, dtype=dtype)
        self._product, self._counts = torch.empty_like(self._factor), torch.zeros(64, device=device)
        self.products = 1
        self.products = max(1, round(iteration_ms / 1e3 / LAYERS / min(self._layer() for _ in range(5))))

    def iteration(self) -> tuple[float, float]:
        """Runs one iteration; returns its seconds, and the slowest layer's excess over the median layer."""
        begun = time.perf_counter()
        layers = [self._layer() for _ in range(LAYERS)]
        synchronize(self.device)
        return time.perf_counter() - begun, max(layers) - statistics.median(layers)

    def _layer(self) -> float:
        begun = time.perf_counter()
        for _ in range(self.products):
            torch.mm(self._factor, self._factor, out=self._product)
        self._counts.cpu()  # as a MoE layer waits for token counts
        return time.perf_counter() - begun


def synchronize(device: torch.device) -> None:
    """Waits for all pending operations of a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def state(device: torch.device, amount: int, tensors: int, buffer: HostBuffer) -> list[Copy]:
    """Returns copies into a buffer, from a state with this many bytes and tensors."""
    elements, copies = amount // 4 // tensors, []
    for number in range(tensors):
        source, start = torch.full((elements,), float(number), device=device), 4 * elements * number
        copies.append(Copy(source, buffer.view(start, start + source.nbytes, torch.float32)))
    return copies


class Counted:
    """Replacement for the copy function that records the tensors and bytes of each call."""

    def __init__(self):
        self.calls: list[tuple[int, int]] = []
        self._copy = device_copy._copy_all

    def __call__(self, copies: Sequence[Copy], non_blocking: bool) -> None:
        """Records and forwards a call."""
        self.calls.append((len(copies), nbytes(copies)))
        self._copy(copies, non_blocking)


def case(work: Work, copies: Sequence[Copy], piece: int) -> dict:
    """Measures iterations with and without a concurrent snapshot, in turns."""
    how = FromDevice(work.device, lambda: None) if work.device.type == "cuda" else FromHost()
    capturing: Capturer = ThreadCapturer(Gate(piece), how)
    told: dict[str, list[float]] = {name: [] for name in ("alone_s", "beside_s", "wait_s", "start_s", "copy_s")}
    with mock.patch.object(device_copy, "_copy_all", counted := Counted()):
        capturing.start(copies).wait()  # creates the thread
        for _ in range(ROUNDS):
            told["alone_s"].append(work.iteration()[0])
            begun = time.perf_counter()
            started = capturing.start(copies)
            told["start_s"].append(time.perf_counter() - begun)
            seconds, wait_s = work.iteration()
            started.wait()
            told["beside_s"].append(time.perf_counter() - begun)
            told["wait_s"].append(wait_s)
            told["copy_s"].append(started.seconds)
    capturing.close()
    assert all(bool((one.target == one.source.cpu()).all()) for one in copies[:: max(1, len(copies) // 8)])
    calls = len(counted.calls) // (ROUNDS + 1)
    most = max(amount for _, amount in counted.calls)
    return told | {"calls": calls, "tensors": len(copies), "bytes": nbytes(copies), "most_bytes_of_a_call": most}


def limits(device: torch.device, side: int, amount: int) -> dict[str, float]:
    """Returns bytes per second of one copy into pinned and pageable memory, and into pinned memory during products."""
    source = torch.zeros(amount, dtype=torch.uint8, device=device)
    locked = HostBuffer(amount, pin=device.type == "cuda")
    found = {
        "locked": _rate(device, source, locked.values),
        "not locked": _rate(device, source, torch.empty(amount, dtype=torch.uint8)),
    }
    if device.type == "cuda":
        factor = torch.randn(side, side, device=device, dtype=torch.bfloat16)
        found["locked, beside products"] = _rate(device, source, locked.values, lambda: torch.mm(factor, factor))
    locked.close()
    return found


def _rate(device: torch.device, source: torch.Tensor, target: torch.Tensor, beside: Callable | None = None) -> float:
    rates = []
    for _ in range(3):
        synchronize(device)
        for _ in range(20 if beside else 0):
            beside()  # pyright: ignore[reportOptionalCall]  # not without one
        begun = time.perf_counter()
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            stream.synchronize()
        else:
            target.copy_(source)
        rates.append(source.nbytes / (time.perf_counter() - begun))
    return max(rates)


def measure(device: torch.device, size: Size) -> dict:
    """Measures the limits and all cases."""
    told: dict = {"limits": limits(device, size.side, size.amounts[0]), "cases": []}
    for amount in size.amounts:
        buffer = HostBuffer(amount, pin=device.type == "cuda")
        for iteration_ms in size.iterations_ms:
            work = Work(device, size.side, iteration_ms)
            for tensors in (1, TENSORS):
                copies = state(device, amount, tensors, buffer)
                for name, piece in PIECES.items():
                    about = dict(amount=amount, iteration_ms=iteration_ms, piece=name, flat=tensors == 1)
                    told["cases"].append(about | case(work, copies, piece))
        buffer.close()
    return told


def main() -> None:
    """Measures, prints the results, and writes all samples."""
    own = command_line(__doc__).parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    size = ON_GPU if device.type == "cuda" else ON_CPU
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu: only calls and bytes are meaningful"
    told = measure(device, size)
    rows = [
        (
            f"{one['bytes'] / 1e9:.2f} GB, {one['piece']}, {'flat' if one['flat'] else 'of ' + str(one['tensors'])}",
            f"{one['iteration_ms']} ms",
            f"{statistics.median(one['beside_s']) / statistics.median(one['alone_s']):.3f}",
            f"{1e3 * statistics.median(one['wait_s']):.2f}",
            f"{1e3 * statistics.median(one['start_s']):.2f}",
            f"{1e3 * statistics.median(one['copy_s']):.1f}",
            str(one["calls"]),
        )
        for one in told["cases"]
    ]
    columns = ("snapshot", "iteration", "beside/alone", "wait ms", "start ms", "copy ms", "calls")
    rates = ", ".join(f"{what} {rate / 1e9:.1f} GB/s" for what, rate in told["limits"].items())
    show(100, [(table(name, columns, rows), [f"limits: {rates}"])])
    write_json(own.output, {"device": name, "machine": machine(), "size": asdict(size)} | told)


if __name__ == "__main__":
    main()
