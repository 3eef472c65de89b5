"""Errors of checkpoints and storage."""

import errno

NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
"""Error numbers of too little memory."""


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete, damaged or incompatible; the message names the cause and the remedy."""


class NoRoomError(CheckpointError):
    """Memory does not suffice: the message names the remedy, and a later attempt may succeed."""


class TakenError(CheckpointError):
    """Another job owns the place: this one must stop writing there."""


class SupersededError(TakenError):
    """The caller has been superseded in the place, by a newer generation of its job or by another job."""


class MissingRegionError(RuntimeError):
    """Files do not hold all of a requested tensor; the message names it."""


class DamagedRegionError(MissingRegionError):
    """Files hold the tensor, but its bytes were altered; the message names file and tensor."""
