"""Checks whether this worker's compute device still works.

A CUDA context fails in every call after its first failure: a device-side assert, an uncorrectable memory error, or the
loss of a peer's memory.  Only another process gets a new context.
"""

from __future__ import annotations

import threading

import torch

PATIENCE_S = 60.0
"""Seconds to wait for enqueued work; kernels of aborted groups end immediately."""


class BrokenDeviceError(RuntimeError):
    """Failure of the device in this process; the message continues a sentence about the worker."""


def synchronize(device: torch.device) -> None:
    """Waits until all work enqueued on the device is complete; raises RuntimeError if the device has failed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def query(device: torch.device) -> None:
    """Raises RuntimeError if the device is known to have failed; does not wait."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).query()


def check(device: torch.device) -> None:
    """Raises BrokenDeviceError if the device is known to have failed; does not wait."""
    try:
        query(device)
    except RuntimeError as error:
        raise _broken(error) from error


def check_patiently(device: torch.device, patience_s: float = PATIENCE_S) -> None:
    """Waits for all enqueued work, with a timeout.

    Raises:
        BrokenDeviceError: the device has failed, or does not answer within ``patience_s``.
    """
    failures: list[RuntimeError | None] = []

    def wait() -> None:
        try:
            synchronize(device)
            failures.append(None)
        except RuntimeError as error:
            failures.append(error)

    waiting = threading.Thread(target=wait, name="device", daemon=True)
    waiting.start()
    waiting.join(patience_s)
    if not failures:
        raise BrokenDeviceError(f"has a device that has not answered for {patience_s:g} s")
    if failures[0] is not None:
        raise _broken(failures[0]) from failures[0]


def denies(error: Exception) -> bool:
    """Returns whether an error reports an unusable device, such as one that is no longer on the bus."""
    kind = getattr(torch, "AcceleratorError", None)  # since torch 2.8
    return kind is not None and isinstance(error, kind)


def _broken(error: Exception) -> BrokenDeviceError:
    return BrokenDeviceError(f"has a device that does not work any more ({str(error).strip().partition(chr(10))[0]})")
