"""Copies gradients to a second buffer on the device, so that the next iteration may clear them immediately.

Without it, training waits for the copies of gradients to host memory: the next iteration clears and accumulates
gradients from its first micro batch on.  From the second buffer they are copied during that iteration, as state is.

Cost: one more copy within the device's memory, on the stream of training, and the memory of one snapshot's gradients
(4 bytes per parameter of the experts that are saved by them).
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from moc.snapshot.device_copy import Capture, Copy
from moc.stream import StreamSpans, marker_of

_ALIGNMENT = 16  # bytes; a multiple of each element's size
_MARGIN = 1.25  # the chosen experts, and so the bytes, change from snapshot to snapshot


class GradientStaging:
    """Second buffer of the gradients of one snapshot."""

    def __init__(self, device: torch.device):
        self._mark = marker_of(device)
        self._buffers: dict[torch.device, torch.Tensor] = {}
        self._reading: Capture | None = None
        self._has_memory = True

    def stage(self, copies: Sequence[Copy]) -> tuple[list[Copy], Callable[[], float]] | None:
        """Copies the sources to the second buffer, once its earlier content is in host memory.

        Returns:
            The copies from the second buffer instead, and a function that returns the delay of training in
            seconds, valid once these copies are done.  None if the device lacks memory; the gradients must then be
            copied before they are cleared, now and in all later snapshots.
        """
        if not self._has_memory:
            return None
        started_at = time.perf_counter()
        if self._reading is not None:
            self._reading.wait()
            self._reading = None
        try:
            stages = self._views(copies)
        except torch.OutOfMemoryError:
            self._buffers.clear()
            self._has_memory = False  # each attempt would empty torch's cache of device memory
            return None
        spans = None if self._mark is None else StreamSpans(self._mark)
        with contextlib.nullcontext() if spans is None else spans.span(), torch.no_grad():
            sources = [copy.source for copy in copies]
            torch._foreach_copy_(stages, sources)  # pyright: ignore[reportPrivateImportUsage]  # no public one
        seconds = time.perf_counter() - started_at
        delay = functools.cache(lambda: seconds if spans is None else seconds + spans.take())
        return [Copy(stage, copy.target) for stage, copy in zip(stages, copies, strict=True)], delay

    def is_read_by(self, capture: Capture) -> None:
        """Records the copies that read the second buffer; its content is kept until they are done."""
        self._reading = capture

    def _views(self, copies: Sequence[Copy]) -> list[torch.Tensor]:
        """Returns a part of the second buffer for each source, of its size, dtype and device.

        Raises:
            torch.OutOfMemoryError: the device lacks memory.
        """
        starts: list[int] = []
        sizes: dict[torch.device, int] = defaultdict(int)
        for copy in copies:
            starts.append(sizes[copy.source.device])
            sizes[copy.source.device] += -(-copy.source.nbytes // _ALIGNMENT) * _ALIGNMENT
        for device, nbytes in sizes.items():
            if device not in self._buffers or self._buffers[device].numel() < nbytes:
                self._buffers.pop(device, None)  # first, since both may not fit
                self._buffers[device] = _allocate(int(_MARGIN * nbytes), device)
        return [
            self._buffers[copy.source.device][start : start + copy.source.nbytes].view(copy.source.dtype)
            for copy, start in zip(copies, starts, strict=True)
        ]


def _allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """Returns bytes of a device's memory, if as many are free beyond what training has reserved.

    Raises:
        torch.OutOfMemoryError: they are not.
    """
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < nbytes:
        raise torch.OutOfMemoryError(f"no {nbytes} bytes of {device} are free")
    return torch.empty(nbytes, dtype=torch.uint8, device=device)
