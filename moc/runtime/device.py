"""Waits for and checks this worker's compute device, and the values that collectives compute on it.

A CUDA context fails in every call after its first failure: a device-side assert, an uncorrectable memory error, or the
loss of a peer's memory.  Only another process gets a new context.

After an abort, values are undefined (:mod:`moc.runtime.groups`).  Code that uses values on the host, or installs them
in state that outlives the generation, calls :func:`synchronize_and_check`, :func:`copy_to_host` or :class:`HostCopy`.
Nothing else detects that the generation ended meanwhile.
"""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist

from moc.runtime.process_group import Group

SYNCHRONIZE_TIMEOUT_S = 60.0
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


def check_device(device: torch.device) -> None:
    """Raises BrokenDeviceError if the device is known to have failed; does not wait."""
    try:
        query(device)
    except RuntimeError as error:
        raise _broken_device_error(error) from error


def check_with_timeout(device: torch.device) -> None:
    """Waits for all enqueued work, with a timeout.

    Raises:
        BrokenDeviceError: the device has failed, or does not answer within :data:`SYNCHRONIZE_TIMEOUT_S`.
    """
    failures: list[RuntimeError | None] = []

    def wait() -> None:
        try:
            synchronize(device)
            failures.append(None)
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=wait, name="device", daemon=True)
    thread.start()
    thread.join(SYNCHRONIZE_TIMEOUT_S)
    if not failures:
        raise BrokenDeviceError(f"has a device that has not answered for {SYNCHRONIZE_TIMEOUT_S:g} s")
    if failures[0] is not None:
        raise _broken_device_error(failures[0]) from failures[0]


def is_device_error(error: Exception) -> bool:
    """Returns whether an error reports an unusable device, such as one that is no longer on the bus."""
    kind = getattr(torch, "AcceleratorError", None)  # since torch 2.8
    return kind is not None and isinstance(error, kind)


def _broken_device_error(error: Exception) -> BrokenDeviceError:
    return BrokenDeviceError(f"has a device that does not work any more ({str(error).strip().partition(chr(10))[0]})")


def synchronize_and_check(device: torch.device) -> None:
    """Waits until all work enqueued on this process's device is complete; checks that this process has not aborted it.

    Raises:
        Aborted: the generation of our groups is over, so results are undefined.
    """
    synchronize(device)
    check_generation()


def copy_to_host(values: torch.Tensor) -> torch.Tensor:
    """Copies values to host memory, which waits for the device; checks that this process has not aborted them.

    Peers may have aborted them, unless all workers agree on the values later, as in a commit all-reduce.

    Raises:
        Aborted: the generation of our groups is over, so the values are undefined.
    """
    copied = values.cpu()
    check_generation()
    return copied


class HostCopy:
    """Asynchronous copy of a few values to host memory; work that is enqueued later does not delay it.

    Args:
        values: tensor of any dtype and shape.
    """

    def __init__(self, values: torch.Tensor):
        is_on_gpu = values.device.type == "cuda"
        self._device = values.device
        self._copied = torch.empty(values.shape, dtype=values.dtype, pin_memory=is_on_gpu)
        self._copied.copy_(values, non_blocking=True)
        self._event = torch.cuda.Event() if is_on_gpu else None
        if self._event is not None:
            self._event.record()

    def wait(self) -> torch.Tensor:
        """Returns the values as soon as the device has copied them; checks them as :func:`copy_to_host`.

        Raises:
            Aborted: the generation of our groups is over, so the values are undefined.
        """
        return copy_to_host(self.wait_unchecked())

    def wait_unchecked(self) -> torch.Tensor:
        """As :meth:`wait`, for values of a committed iteration, which an abort leaves valid; from any thread."""
        if self._event is not None:
            with torch.cuda.device(self._device):  # otherwise a new thread's call creates a context on device 0
                self._event.synchronize()
        return self._copied


def check_generation() -> None:
    """Raises Aborted if this generation is over; on a GPU, results of collectives may then be undefined."""
    world = dist.group.WORLD
    if isinstance(world, Group):
        world.connected_group()
