"""Errors of checkpoints and storage."""

import errno
from collections.abc import Callable, Iterable

from moc.errors import UserError

OUT_OF_SPACE_ERRNOS = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
"""Error numbers of too little memory."""


def for_each[T](items: Iterable[T], action: Callable[[T], None]) -> None:
    """Applies an action to every item, also after an OSError; then raises the first one."""
    errors: list[OSError] = []
    for item in items:
        try:
            action(item)
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


class CheckpointError(UserError, RuntimeError):
    """A checkpoint is missing, incomplete, damaged or incompatible; the message names the cause and the remedy."""


class InsufficientMemoryError(CheckpointError):
    """Memory does not suffice: the message names the remedy, and a later attempt may succeed."""

    code = "memory-full"


class TakenError(CheckpointError):
    """Another job owns the storage location: this one must stop writing there."""

    code = "directory-in-use"


class SupersededError(TakenError):
    """A newer generation of the caller's job, or another job, has taken the storage location."""

    code = "directory-taken-over"


class MissingTensorError(UserError, RuntimeError):
    """Files do not hold all of a requested tensor; the message names it."""

    code = "tensor-missing"


class DamagedTensorError(MissingTensorError):
    """Files hold the tensor, but its bytes were altered; the message names file and tensor."""

    code = "checkpoint-damaged"
