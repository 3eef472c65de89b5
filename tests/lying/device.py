"""The device: one stream for the compute thread, and persistent errors."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

VARIABLE = "LYING_DEVICE"


@dataclass(frozen=True)
class Lies:
    """How often the device lies in one of several possible ways.

    Attributes:
        seed: of all choices.
        completes: chance that an operation whose peer is gone completes, with garbage, before this worker aborts.
        breaks: chance that an abort leaves the device broken.
        how: effects of such an abort, equally likely: it fails, or leaves a persistent error.
        spares: ranks whose devices never break.
    """

    seed: int = 0
    completes: float = 0.5
    breaks: float = 0.0
    how: tuple[str, ...] = ("fails", "stays")
    spares: tuple[int, ...] = ()

    @classmethod
    def from_environment(cls) -> Lies:
        """Reads ``LYING_DEVICE``."""
        given = json.loads(os.environ.get(VARIABLE, "{}"))
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


COPIES = ("aten::copy_", "aten::cat")
"""Computations that are only enqueued while the stream has something to wait for, as all are on a GPU."""

_WITHOUT_VALUES = frozenset(
    f"aten::{name}"
    for name in """
        alias as_strided detach empty empty_like empty_strided expand new_empty new_empty_strided new_zeros select slice
        split split_with_sizes squeeze t transpose unbind unsqueeze view zeros zeros_like
    """.split()
)
"""Operations that read no values: they make views, or allocate memory that nothing on the stream uses."""


class Later:
    """A computation on the stream; the first thread that waits for it executes it."""

    def __init__(self, compute: Callable[[], object]):
        self._compute: Callable[[], object] | None = compute
        self._lock = threading.Lock()

    @property
    def done(self) -> Later:
        """As the event of an operation: this object has its ``wait``."""
        return self

    def is_set(self) -> bool:
        """Whether it was executed."""
        return self._compute is None

    def wait(self, timeout: float | None = None) -> None:
        """Executes the computation, unless that was done."""
        with self._lock:
            compute, self._compute = self._compute, None
            if compute is not None:
                with _disable_current_modes():  # else it would be enqueued again
                    compute()


class StreamMark:
    """A place on the stream, as ``torch.cuda.Event``; it counts as reached at the first query that sees it."""

    def __init__(self):
        self._ahead, self._reached = DEVICE.ahead, 0.0

    def query(self) -> bool:
        """Whether the stream has got there."""
        if not self._reached and all(work.done.is_set() for work in self._ahead):
            self._reached, self._ahead = time.monotonic(), []
        return bool(self._reached)

    def elapsed_time(self, end_event: StreamMark) -> float:
        """Milliseconds from here to a later mark, both reached."""
        return 1e3 * (end_event._reached - self._reached)


class Stream:
    """Operations that the compute thread waits for before it computes or reads."""

    def __init__(self):
        self.broken = ""
        self._waits: list = []
        self._aside = False

    def wait_for(self, work) -> None:
        """Lets the stream wait for an operation; this thread does not."""
        self._waits.append(work)

    @property
    def holds_back(self) -> bool:
        """Whether this thread is to wait for the stream before it computes."""
        is_computing = threading.current_thread() is threading.main_thread() and not self._aside
        return is_computing and bool(self._waits or self.broken)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Within the block, the compute thread works in host memory: it neither uses the stream nor waits for it."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    @property
    def ahead(self) -> list:
        """Predecessors of operations that are enqueued now."""
        return [*self._waits]

    def drain(self) -> None:
        """Waits for the stream.  Results may be undefined by now, without an error."""
        while self._waits:
            self._waits.pop(0).done.wait()
        if self.broken:
            raise RuntimeError(self.broken)


DEVICE = Stream()
"""That of this process."""


class Computing(TorchDispatchMode):
    """Makes each computation of the thread that enters it wait for the stream, or enqueues it there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Computes, now or when the stream gets there."""
        compute = functools.partial(func, *args, **(kwargs or {}))
        if not DEVICE.holds_back or (name := func._schema.name) in _WITHOUT_VALUES:
            return compute()
        if DEVICE.broken or name not in COPIES:
            DEVICE.drain()
            return compute()
        if name == "aten::copy_":
            DEVICE.wait_for(Later(compute))
            return args[0]
        shape = torch.cat([torch.empty_like(part, device="meta") for part in args[0]], *args[1:])
        joined = torch.empty(shape.shape, dtype=shape.dtype)
        DEVICE.wait_for(Later(lambda: joined.copy_(compute())))
        return joined


def compute_on_stream() -> None:
    """From now on, this thread computes on the stream, and reads what is on it."""
    Computing().__enter__()
    tensor = torch.Tensor
    for name in ("tolist", "numpy", "cpu"):  # on the CPU, these read without dispatch
        read = getattr(tensor, name)

        def reading(self, *args, read=read, **kwargs):
            if DEVICE.holds_back:
                DEVICE.drain()
            return read(self, *args, **kwargs)

        setattr(tensor, name, reading)


def fill_with_garbage(tensors: list[torch.Tensor], chance: random.Random) -> None:
    """Fills the memory of an operation that never completed: unchanged, zeros, or random values."""
    kind = chance.choice(("stale", "zeros", "bits"))
    for tensor in tensors if kind != "stale" else ():
        flat = tensor.detach().view(-1) if tensor.is_contiguous() else None
        if flat is None or not flat.numel():
            continue
        if kind == "zeros":
            flat.zero_()
        else:
            part = flat.view(torch.uint8)
            bits = torch.frombuffer(bytearray(chance.randbytes(min(part.numel(), 1 << 12))), dtype=torch.uint8)
            part[: bits.numel()].copy_(bits)
