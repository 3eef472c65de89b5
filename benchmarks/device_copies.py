"""What copies of a snapshot cost the device that trains meanwhile, piece by piece and otherwise.

    python benchmarks/device_copies.py --output docs/results/gpu_copies.json

An "iteration" here is a number of layers, each of which multiplies matrices and then waits for a few bytes from the
device, as megatron-core's MoE layers wait for the tokens of each expert before they dispatch.  A snapshot of the given
size is copied beside each, whole or in pieces, of one tensor or of many, by the code that training uses.  Told for each
case: how long iterations take beside those without a copy, the longest wait of a layer, how long the copy and its start
take, and numbers of calls and bytes.  Beside it, in the same run, the limits: the bandwidth of one copy into locked
memory and into memory that is not, alone and beside products.

Without a GPU it runs the same code on the CPU, where only calls and bytes mean anything: it makes them small.
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
from moc.snapshot import capture
from moc.snapshot.capture import Capturer, FromDevice, FromHost, Gate, ThreadCapturer
from moc.snapshot.copies import Copy, nbytes
from moc.store.buffers import Buffer

MB = 1 << 20
LAYERS = 24
TENSORS = 3000  # of a snapshot, if it is not flat: about those of ZeRO's masters and moments
PIECES = {"whole": 1 << 60, "64 MB": 64 * MB, "16 MB": 16 * MB}
ROUNDS = 5


@dataclass(frozen=True)
class Size:
    """Of what is measured.

    Attributes:
        amounts: bytes of a snapshot.
        iterations_ms: lengths of iterations.
        side: of the matrices of the products.
    """

    amounts: Sequence[int]
    iterations_ms: Sequence[int]
    side: int


ON_GPU = Size((1000 * MB, 2000 * MB, 3000 * MB), (150, 400), 8192)
ON_CPU = Size((48 * MB,), (20,), 128)


class Work:
    """Iterations of a given length on a device."""

    def __init__(self, device: torch.device, side: int, iteration_ms: float):
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.device, self._factor = device, torch.randn(side, side, device=device, dtype=dtype)
        self._product, self._counts = torch.empty_like(self._factor), torch.zeros(64, device=device)
        self.products = 1
        self.products = max(1, round(iteration_ms / 1e3 / LAYERS / min(self._layer() for _ in range(5))))

    def iteration(self) -> tuple[float, float]:
        """Computes one; returns its seconds, and how much longer than the median the slowest layer took."""
        begun = time.perf_counter()
        layers = [self._layer() for _ in range(LAYERS)]
        synchronize(self.device)
        return time.perf_counter() - begun, max(layers) - statistics.median(layers)

    def _layer(self) -> float:
        begun = time.perf_counter()
        for _ in range(self.products):
            torch.mm(self._factor, self._factor, out=self._product)
        self._counts.cpu()  # what a MoE layer waits for
        return time.perf_counter() - begun


def synchronize(device: torch.device) -> None:
    """Waits for all that a device was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def state(device: torch.device, amount: int, tensors: int, buffer: Buffer) -> list[Copy]:
    """Copies of a state of so many bytes and tensors, into a buffer."""
    elements, copies = amount // 4 // tensors, []
    for number in range(tensors):
        source, start = torch.full((elements,), float(number), device=device), 4 * elements * number
        copies.append(Copy(source, buffer.view(start, start + source.nbytes, torch.float32)))
    return copies


class Counted:
    """Counts the calls that copy, the tensors and the bytes of each."""

    def __init__(self):
        self.calls: list[tuple[int, int]] = []
        self._copy = capture._copy_all

    def __call__(self, copies: Sequence[Copy], non_blocking: bool) -> None:
        """As what it counts."""
        self.calls.append((len(copies), nbytes(copies)))
        self._copy(copies, non_blocking)


def case(work: Work, copies: Sequence[Copy], piece: int) -> dict:
    """Iterations with a snapshot beside each, and without, in turns."""
    how = FromDevice(work.device, lambda: None) if work.device.type == "cuda" else FromHost()
    capturing: Capturer = ThreadCapturer(Gate(piece), how)
    told: dict[str, list[float]] = {name: [] for name in ("alone_s", "beside_s", "wait_s", "start_s", "copy_s")}
    with mock.patch.object(capture, "_copy_all", counted := Counted()):
        capturing.start(copies).wait()  # makes the thread
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
    """Bytes a second of one copy: into locked memory, into other memory, and into locked memory beside products."""
    source = torch.zeros(amount, dtype=torch.uint8, device=device)
    locked = Buffer(amount, pin=device.type == "cuda")
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
    """All cases, and the limits beside them."""
    told: dict = {"limits": limits(device, size.side, size.amounts[0]), "cases": []}
    for amount in size.amounts:
        buffer = Buffer(amount, pin=device.type == "cuda")
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
    """Measures, prints, and writes every sample."""
    own = command_line(__doc__).parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    size = ON_GPU if device.type == "cuda" else ON_CPU
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu: calls and bytes alone mean something"
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
