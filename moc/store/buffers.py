"""Host buffers for snapshots and logs, allocated once and reused."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch

from moc.files.safe_directory import remove_owned
from moc.store.errors import OUT_OF_SPACE_ERRNOS, CheckpointError, InsufficientMemoryError
from moc.store.reserved_memory import allocate_file


class HostBuffer:
    """Shared memory of a fixed size, allocated up front, so that later writes cannot run out of memory.

    Args:
        nbytes: size in bytes.
        path: file in a memory file system, which outlives the process; None for anonymous memory.
        pin: page-lock it for CUDA, so that copies run asynchronously.
        purpose: purpose of the buffer, for the error message.
        remedy: the remedy without a buffer, for the error message.

    Raises:
        InsufficientMemoryError: memory is insufficient.
        CheckpointError: the file cannot be made, or CUDA cannot lock the memory.
    """

    def __init__(
        self,
        nbytes: int,
        path: Path | None = None,
        pin: bool = False,
        purpose: str = "a snapshot",
        remedy: str = "pass --ckpt-tier disk",
    ):
        self.nbytes, self.path = nbytes, path
        try:
            self._map = _allocate(nbytes, path)
        except OSError as error:
            location = path.parent if path else "host memory"
            raise (InsufficientMemoryError if error.errno in OUT_OF_SPACE_ERRNOS else CheckpointError)(
                f"{location} has no room for {purpose} buffer of {nbytes:,} bytes ({error.strerror}). Fix: free "
                "memory, enlarge the file system (Docker: --shm-size), name another one with --ckpt-memory-dir, or "
                f"{remedy}",
                code="memory-full",
            ) from None
        self.memory: memoryview = memoryview(self._map)
        self.values: torch.Tensor = torch.from_numpy(numpy.frombuffer(self._map, dtype=numpy.uint8))
        self._pinned = False
        if pin and nbytes > 0:
            try:
                _check_cuda(_cudart().cudaHostRegister(self.values.data_ptr(), nbytes, 0))
            except CheckpointError:
                self.close()
                raise
            self._pinned = True

    def view(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns the bytes [start, stop) as a flat tensor."""
        return self.values[start:stop].view(dtype)

    def close(self) -> None:
        """Frees the memory, which invalidates all views of it."""
        if self._pinned:
            _check_cuda(_cudart().cudaHostUnregister(self.values.data_ptr()))
            self._pinned = False
        if self.path is not None:
            remove_owned(self.path)
        # use after close raises
        self.values = self.memory = self._map = None  # pyright: ignore[reportAttributeAccessIssue]


def _allocate(nbytes: int, path: Path | None) -> mmap.mmap:
    if path is not None:
        descriptor = allocate_file(path, nbytes)
    else:
        if nbytes > psutil.virtual_memory().available:  # otherwise only the OOM killer would limit it
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        descriptor = os.memfd_create("snapshot")
    try:
        if path is None:
            os.posix_fallocate(descriptor, 0, max(nbytes, 1))
        return mmap.mmap(descriptor, max(nbytes, 1), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError:
        if path is not None:
            remove_owned(path)
        raise
    finally:
        os.close(descriptor)


def _cudart() -> Any:
    return torch.cuda.cudart()  # untyped in torch


def _check_cuda(status) -> None:
    if int(status) != 0:
        raise CheckpointError(
            f"CUDA cannot lock host memory (error {int(status)}). Fix: raise the limit with `ulimit -l unlimited`",
            code="memory-lock-refused",
        )
