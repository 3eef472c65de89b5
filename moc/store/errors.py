"""Errors of checkpoints and storage."""

import errno

from moc.errors import UserError

OUT_OF_SPACE_ERRNOS = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
"""Error numbers of too little memory."""


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
