"""Errors of checkpoints and storage."""

import errno

from moc.errors import UserError

NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
"""Error numbers of too little memory."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint is missing, incomplete, damaged or incompatible; the message names the cause and the remedy."""


class NoRoomError(CheckpointError):
    """Memory does not suffice: the message names the remedy, and a later attempt may succeed."""

    code = "memory-full"


class TakenError(CheckpointError):
    """Another job owns the place: this one must stop writing there."""

    code = "directory-in-use"


class SupersededError(TakenError):
    """The caller has been superseded in the place, by a newer generation of its job or by another job."""

    code = "directory-taken-over"


class MissingRegionError(UserError, RuntimeError):
    """Files do not hold all of a requested tensor; the message names it."""

    code = "tensor-missing"


class DamagedRegionError(MissingRegionError):
    """Files hold the tensor, but its bytes were altered; the message names file and tensor."""

    code = "checkpoint-damaged"
