"""The device: its one stream, on which the compute thread is, and its errors, which stay."""

from __future__ import annotations

import json
import os
import random
import threading
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

VARIABLE = "LYING_DEVICE"


@dataclass(frozen=True)
class Lies:
    """How often the device lies in one of several possible ways.

    Attributes:
        seed: of all choices.
        completes: chance that an operation whose peer is gone completes, with garbage, before this worker aborts.
        breaks: chance that an abort leaves the device broken.
        how: what such an abort does, each as often: it fails, or leaves an error that stays.
        spares: ranks whose devices never break.
    """

    seed: int = 0
    completes: float = 0.5
    breaks: float = 0.0
    how: tuple[str, ...] = ("fails", "stays")
    spares: tuple[int, ...] = ()

    @classmethod
    def from_environment(cls) -> Lies:
        """As ``LYING_DEVICE`` says."""
        given = json.loads(os.environ.get(VARIABLE, "{}"))
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


class Stream:
    """What the compute thread waits for before it computes or reads: all that it has asked the stream to wait for."""

    def __init__(self):
        self.broken = ""
        self._waits: list = []

    def wait_for(self, work) -> None:
        """Lets the stream wait for an operation; this thread does not."""
        self._waits.append(work)

    @property
    def ahead(self) -> list:
        """What operations that are enqueued now wait for."""
        return [*self._waits]

    def drain(self) -> None:
        """Waits for the stream.  What it waited for may be garbage by now: it does not say so."""
        while self._waits:
            self._waits.pop(0).done.wait()
        if self.broken:
            raise RuntimeError(self.broken)


DEVICE = Stream()
"""That of this process."""


class Computing(TorchDispatchMode):
    """Makes each computation of the thread that enters it wait for the stream."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Waits, and computes."""
        if DEVICE._waits or DEVICE.broken:
            if threading.current_thread() is threading.main_thread():
                DEVICE.drain()
        return func(*args, **(kwargs or {}))


def compute_on_stream() -> None:
    """From now on, this thread computes on the stream, and reads what is on it."""
    Computing().__enter__()
    tensor = torch.Tensor
    for name in ("tolist", "numpy"):  # these read without dispatch
        read = getattr(tensor, name)

        def reading(self, *args, read=read, **kwargs):
            if threading.current_thread() is threading.main_thread():
                DEVICE.drain()
            return read(self, *args, **kwargs)

        setattr(tensor, name, reading)


def fill_with_garbage(tensors: list[torch.Tensor], chance: random.Random) -> None:
    """What is in the memory of an operation that never came to its end: what was there, nothing, or anything."""
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
